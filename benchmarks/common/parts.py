"""A benchmark in parts: what a part is, and the command that runs them. Rows come as they are made, goals at the end."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common.record import GoalEntry, Record, Row, describe_machine, goal

SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of the command line that parts read."""

    quick: bool = False
    seed: int = 0
    """Seed of everything drawn by chance."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device of real steps; the other parts need none."""
    of: tuple[str, ...] = ()
    """Cases of a part to measure alone (``Part.case``); all where empty."""

    processor_time: bool = False
    """Real steps in one thread, timed by what the process takes of the processor: for a machine that others load."""
    peaks: Path | None = None
    """Result of an earlier run with what needs no quiet machine, for parts that take their time from there."""
    machine: Path | None = None
    """File that keeps a machine once probed and calibrated, for parts that need one; None to do it anew each time."""

    def wants(self, case: object) -> bool:
        return not self.of or str(case) in self.of


@dataclass(frozen=True, kw_only=True)
class Part:
    """One name of ``--only``."""

    name: str
    measure: Callable[[Options], Iterator[Row]]
    """Each row has ``part``: the name."""
    summarize: Callable[[Sequence[Row]], Mapping[str, GoalEntry]]
    """Goals (``record.goal``) by their descriptions, from this part's rows."""
    case: str | None = None
    """The field of a row that names its case, where cases can be measured one by one."""
    is_extra: bool = False
    """Run only where it is asked for by name."""


def run_parts(parts: Sequence[Part], *, prog: str, description: str | None) -> int:
    """Run a benchmark from the command line and return its exit code (``Record.finish``). An error in one part becomes a row."""
    by_name = {part.name: part for part in parts}
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems; under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well, after every row")
    parser.add_argument("--only", choices=list(by_name), action="append", help="these parts alone; may be repeated")
    parser.add_argument("--of", metavar="CASE", action="append", help="these cases alone; may be repeated")
    parser.add_argument("--add", action="store_true", help="keep what FILE has of other parts and cases")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="keep the calibrated machine there, for later runs")
    parser.add_argument("--peaks", type=Path, metavar="FILE", help="an earlier result whose peaks are not measured again")
    parser.add_argument("--processor-time", action="store_true", help="time one thread's processor time: others load the machine")
    parser.add_argument("--seed", type=int, default=SEED, help="of everything drawn by chance")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    options = Options(
        quick=arguments.quick,
        seed=arguments.seed,
        device=torch.device(arguments.device),
        of=tuple(arguments.of or ()),
        machine=arguments.machine,
        peaks=arguments.peaks,
        processor_time=arguments.processor_time,
    )
    record = Record(
        file=arguments.json,
        machine=describe_machine(options.device),
        is_quick=options.quick,
        is_whole=not arguments.of or arguments.add,
    )
    wanted = arguments.only or [part.name for part in parts if not part.is_extra]
    chosen = [part for part in parts if part.name in wanted]
    if arguments.add and arguments.json is not None and arguments.json.exists():
        record.rows = rows_to_keep(json.loads(arguments.json.read_text())["rows"], chosen, options)
    for part in chosen:
        record.add_all(part.name, part.measure(options))
    with_rows = {row.get("part") for row in record.rows}
    goals: dict[str, GoalEntry] = {}
    for part in (part for part in parts if part in chosen or part.name in with_rows):
        goals |= part.summarize([row for row in record.rows if row.get("part") == part.name])
    num_failed = sum(row.get("what") == "failed" for row in record.rows)
    return record.finish({**goals, "parts that failed": goal(num_failed, 0, met=num_failed == 0)})


def rows_to_keep(rows: Sequence[Row], chosen: Sequence[Part], options: Options) -> list[Row]:
    """Select the rows of an earlier run that this one does not measure again."""
    by_name = {part.name: part for part in chosen}

    def is_measured_again(row: Row) -> bool:
        part = by_name.get(row.get("part") or row.get("of", ""))
        return part is not None and (part.case is None or part.case not in row or options.wants(row[part.case]))

    return [row for row in rows if not is_measured_again(row)]
