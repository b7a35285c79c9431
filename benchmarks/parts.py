"""A benchmark in parts: what a part is, and the command that runs them. Rows come as they are made, goals at the end."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import Record, Row, describe_machine, goal

SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    quick: bool = False
    seed: int = 0
    """Of everything drawn by chance."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where real steps run; the other parts need none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One name of ``--only``."""

    name: str
    measure: Callable[[Options], Iterator[Row]]
    """Each row has ``part``: the name."""
    summarize: Callable[[Sequence[Row]], Mapping[str, dict[str, Any]]]
    """Goals (``record.goal``) by what they say, of this part's rows. A goal without a row is missed."""


def run_parts(parts: Sequence[Part], *, prog: str, description: str | None) -> int:
    """The command line of a benchmark; 1 where a goal is missed. What goes wrong in one part is told in a row."""
    by_name = {part.name: part for part in parts}
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller problems; under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well, after every row")
    parser.add_argument("--only", choices=list(by_name), action="append", help="these parts alone; may be repeated")
    parser.add_argument("--seed", type=int, default=SEED, help="of everything drawn by chance")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    options = Options(quick=arguments.quick, seed=arguments.seed, device=torch.device(arguments.device))
    record = Record(file=arguments.json, machine=describe_machine(options.device))
    chosen = [part for name, part in by_name.items() if name in (arguments.only or by_name)]
    for part in chosen:
        record.add_all(part.name, part.measure(options))
    for part in chosen:
        record.summary |= part.summarize([row for row in record.rows if row.get("part") == part.name])
    num_failed = sum(row.get("what") == "failed" for row in record.rows)
    record.summary["parts that failed"] = goal(num_failed, 0, met=num_failed == 0)
    record.close()
    return 0 if all(entry["met"] for entry in record.summary.values()) else 1
