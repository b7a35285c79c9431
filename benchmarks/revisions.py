"""Two revisions of this repository side by side: planning, profiling, steps, peaks and telemetry, in turn on one machine.

    python -m benchmarks.revisions --against REVISION [--rounds 3] [--quick] [--json FILE]

The other revision is checked out into a folder of its own. Commands that both have are run there and here in turn (A B, B A),
each in a process of its own with the same environment; a figure is the median of the ratios here / there, pair by pair. Peaks
must be equal. What a user waits for is measured: imports count.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.record import GoalEntry, Record, Row, at_most, describe_machine

ROOT = Path(__file__).resolve().parents[1]
MAX_RATIO = 1.03
_PLANNER = ("-m", "optimizer.cli")
_MODEL = ("--model", "qwen2.5-0.5b", "--gpu", "RTX 3060", "--sequence-length", "1024", "--batch", "8")
_SMALL = ("--model", "headroom-demo-10m", "--gpu", "T4", "--sequence-length", "256", "--batch", "8")

Figures = dict[str, float]
Reader = Callable[[Any], Figures]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that both revisions have, and the figures in the file it writes."""

    name: str
    arguments: tuple[str, ...]
    """After ``python``; ``FILE`` stands for the file that the JSON is read from, which is printed where none is named."""
    read: Reader
    is_cold: bool = False
    """True if each run begins with nothing kept."""


def read_nothing(_: Any) -> Figures:
    return {}


def read_peaks(document: Any) -> Figures:
    """Predicted device peaks, by plan."""
    return {f"peak of {plan['label']}, bytes": plan["prediction"]["device_peak_bytes"] for plan in document["plans"]}


def read_steps(document: Any) -> Figures:
    measured = [row for row in document["rows"] if "measured_ms" in row]
    return {f"step of {row['model']}, {row['plan']}, ms": row["measured_ms"] for row in measured}


def read_telemetry(document: Any) -> Figures:
    measured = [row for row in document["rows"] if "own_ms_per_record" in row]
    return {f"telemetry of {row['plan']}, ms a record": row["own_ms_per_record"] for row in measured}


COMMANDS = (
    Command(name="profile and price", arguments=(*_PLANNER, "estimate", *_SMALL), read=read_nothing, is_cold=True),
    Command(name="price", arguments=(*_PLANNER, "estimate", *_MODEL, "--json"), read=read_peaks),
    Command(name="search", arguments=(*_PLANNER, "plan", *_MODEL, "--budget", "10 GiB"), read=read_nothing),
    Command(name="search, lossy allowed", arguments=(*_PLANNER, "plan", *_MODEL, "--allow-lossy"), read=read_nothing),
    Command(name="steps", arguments=("-m", "benchmarks.step_times", "--quick", "--json", "FILE"), read=read_steps),
    Command(name="telemetry", arguments=("-m", "benchmarks.telemetry", "--quick", "--json", "FILE"), read=read_telemetry),
)
QUICK = ("price", "search")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="REVISION", help="a commit, branch or tag")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command in each revision")
    parser.add_argument("--only", choices=[command.name for command in COMMANDS], action="append")
    parser.add_argument("--quick", action="store_true", help="pricing and searching alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the summary there")
    options = parser.parse_args()
    chosen = options.only or (QUICK if options.quick else [command.name for command in COMMANDS])
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.quick, is_whole=not options.only)
    with tempfile.TemporaryDirectory() as folder, checked_out(options.against, Path(folder)) as there:
        places = {"here": ROOT, "there": there}
        for command in COMMANDS:
            if command.name in chosen:
                for row in compare(command, places, home=Path(folder), num_rounds=options.rounds):
                    record.add(row)
    return record.finish(judge(record.rows))


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    place = folder / "there"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), revision], cwd=ROOT, check=True)
    try:
        yield place
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def compare(command: Command, places: Mapping[str, Path], *, home: Path, num_rounds: int) -> Iterator[Row]:
    """A row for each figure: medians of both, and the median of the ratios here / there."""
    runs: dict[str, list[Figures]] = {name: [] for name in places}
    if not command.is_cold:
        for name, place in places.items():
            run(command, place, home=home / f"home-{name}", file=home / "figures.json")
    for index in range(num_rounds):
        for name in sorted(places, reverse=index % 2 == 1):
            kept = home / (f"cold-{name}-{index}" if command.is_cold else f"home-{name}")
            runs[name].append(run(command, places[name], home=kept, file=home / "figures.json"))
    rounds = list(zip(runs["here"], runs["there"], strict=True))
    for figure in runs["here"][0]:
        pairs = [(here[figure], there[figure]) for here, there in rounds if figure in there]
        if pairs:
            yield {
                "command": command.name,
                "figure": figure,
                "here": statistics.median(here for here, _ in pairs),
                "there": statistics.median(there for _, there in pairs),
                "ratio": round(statistics.median(here / there for here, there in pairs), 4),
                "num_pairs": len(pairs),
            }


def run(command: Command, place: Path, *, home: Path, file: Path) -> Figures:
    """One run's wall and processor seconds, and what the file that it wrote says. Raises where the command fails to end."""
    file.unlink(missing_ok=True)
    home.mkdir(exist_ok=True)
    arguments = [str(file) if argument == "FILE" else argument for argument in command.arguments]
    environment = {**os.environ, "HEADROOM_HOME": str(home), "PYTHONPATH": str(place)}
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - started_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    printed = done.stdout if "--json" in arguments and "FILE" not in command.arguments else "null"
    document = json.loads(file.read_text() if file.exists() else printed)
    figures = command.read(document) if document is not None else {}
    return figures if "benchmarks" in " ".join(arguments) else {"wall, s": wall_s, "processor, s": cpu_s, **figures}


def judge(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge times by the median of each command's ratios, peaks one by one."""
    goals: dict[str, GoalEntry] = {}
    for name in dict.fromkeys(row["command"] for row in rows):
        own = [row for row in rows if row["command"] == name]
        times = [row["ratio"] for row in own if not row["figure"].endswith("bytes") and row["figure"] != "wall, s"]
        if times:
            goals[f"{name}: time here / there"] = at_most(round(statistics.median(times), 4), MAX_RATIO)
    peaks = [row["ratio"] for row in rows if "bytes" in row["figure"]]
    if peaks:
        goals["peaks here / there, largest"] = at_most(max(peaks), 1.0)
    return goals


if __name__ == "__main__":
    sys.exit(main())
