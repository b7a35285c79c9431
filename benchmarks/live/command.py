"""``python -m benchmarks.live [--quick] [--only PART ...] [--viewers COUNT] [--json FILE]``: a run that many watch,
one that is long, cut lines.

- viewers: 200 people follow one run that takes two samples a second; from the sample's line in its file to the event at each of
  them, at most 250 ms for 99 of 100, and what the web process needs for it.
- opening: a page of a run of 100,000 points in Chromium, from the click to the drawn chart, within a second.
- comparing: ten such runs over each other, until every curve is drawn.
- cuts: twenty who follow a run over a line that is cut, while the web and Redis are killed and come back; no point is missing.

The server is what ``headroom up`` starts: uvicorn, Valkey, SQLite; samples go the way of a worker's (``writer.py``). Parts
that are not asked for keep the rows that the file has of them.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.record import GoalEntry, Needs, Record, Row, describe_machine, goal
from benchmarks.live.cuts import measure_cuts
from benchmarks.live.opening import measure_comparing, measure_opening
from benchmarks.live.service import LiveService
from benchmarks.live.viewers import measure_viewers
from optimizer.base.units import MIB

Part = Callable[[LiveService, argparse.Namespace], Row]
PARTS: dict[str, Part] = {
    "viewers": lambda service, asked: measure_viewers(service, is_quick=asked.quick, num_viewers=asked.viewers),
    "opening": lambda service, asked: measure_opening(service, is_quick=asked.quick),
    "comparing": lambda service, asked: measure_comparing(service, is_quick=asked.quick),
    "cuts": lambda service, asked: measure_cuts(service, is_quick=asked.quick),
}
LATENCY_GOAL_MS = 250
MEMORY_GOAL_BYTES = 200 * MIB
OPENING_GOAL_MS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer viewers, shorter: under a minute")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--viewers", type=int, default=0, metavar="COUNT", help="people who watch: 200 by default, up to 1,000")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    whole = set(options.only) == set(PARTS)
    record = Record(file=options.json, machine=describe_machine(), is_quick=options.quick, is_whole=whole)
    record.rows = [row for row in _earlier_rows(options.json) if row["what"] not in options.only]
    for name in options.only:
        with LiveService() as service:
            record.add({"what": name, **PARTS[name](service, options)})
    return record.finish(_summary(record.rows))


def _earlier_rows(file: Path | None) -> list[Row]:
    if file is None or not file.exists():
        return []
    rows: list[Row] = json.loads(file.read_text())["rows"]
    return rows


def _summary(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Judge the parts that have rows. Goals for 200 viewers or 100,000 points need as many."""
    by_part = {row["what"]: row for row in rows}
    goals: tuple[tuple[str, str, str, int, Needs], ...] = (
        ("sample to browser, p99 (ms)", "viewers", "p99_ms", LATENCY_GOAL_MS, "full size"),
        ("web process (bytes)", "viewers", "web_peak_bytes", MEMORY_GOAL_BYTES, "full size"),
        ("opening 100,000 points (ms)", "opening", "median_ms", OPENING_GOAL_MS, "full size"),
        ("points missing after cuts", "cuts", "num_missing", 0, "rows"),
    )
    return {
        name: goal(by_part[part][key], most, met=by_part[part][key] <= most, needs=needs)
        for name, part, key, most, needs in goals
        if part in by_part
    }
