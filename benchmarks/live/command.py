"""``python -m benchmarks.live [--quick] [--only PART ...] [--json FILE]``: a run that many watch, one that is long, cut lines.

- viewers: 200 people follow one run that takes two samples a second; from the sample's line in its file to the event at each of
  them, at most 250 ms for 99 of 100, and what the web process needs for it.
- opening: a page of a run of 100,000 points in Chromium, from the click to the drawn chart, within a second.
- cuts: twenty who follow a run over a line that is cut, while the web and Redis are killed and come back; no point is missing.

The server is what ``headroom up`` starts: uvicorn, Valkey, SQLite; samples go the way of a worker's (``writer.py``). Parts
that are not asked for keep the rows that the file has of them.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.live.cuts import measure_cuts
from benchmarks.live.opening import measure_opening
from benchmarks.live.service import LiveService
from benchmarks.live.viewers import measure_viewers
from optimizer.serialize import to_json
from optimizer.units import MIB

Row = dict[str, object]
Part = Callable[[LiveService, bool], Row]
PARTS: dict[str, Part] = {
    "viewers": lambda service, is_quick: measure_viewers(service, is_quick=is_quick),
    "opening": lambda service, is_quick: measure_opening(service, is_quick=is_quick),
    "cuts": lambda service, is_quick: measure_cuts(service, is_quick=is_quick),
}
LATENCY_GOAL_MS = 250
MEMORY_GOAL_BYTES = 200 * MIB
OPENING_GOAL_MS = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer viewers, shorter: under a minute")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = {str(row["what"]): row for row in _earlier_rows(options.json)}
    for name in options.only:
        with LiveService() as service:
            rows[name] = {"what": name, **PARTS[name](service, options.quick)}
        print("  ".join(f"{key}={value}" for key, value in rows[name].items()), flush=True)
    summary = _summary(rows)
    for goal, entry in summary.items():
        print(f"{goal}: {entry['value']} (goal {entry['goal']}, {'met' if entry['met'] else 'MISSED'})")
    if options.json is not None:
        document = {"machine": _machine(), "rows": list(rows.values()), "summary": summary}
        options.json.write_text(json.dumps(to_json(document), indent=1) + "\n")
    return 0


def _earlier_rows(file: Path | None) -> list[Row]:
    if file is None or not file.exists():
        return []
    rows: list[Row] = json.loads(file.read_text())["rows"]
    return rows


def _summary(rows: dict[str, Row]) -> dict[str, Row]:
    goals = (
        ("sample to browser, p99 (ms)", "viewers", "p99_ms", LATENCY_GOAL_MS),
        ("web process (bytes)", "viewers", "web_peak_bytes", MEMORY_GOAL_BYTES),
        ("opening 100,000 points (ms)", "opening", "median_ms", OPENING_GOAL_MS),
        ("points missing after cuts", "cuts", "num_missing", 0),
    )
    return {
        name: {"value": rows[part][key], "goal": goal, "met": float(str(rows[part][key])) <= goal}
        for name, part, key, goal in goals
        if part in rows
    }


def _machine() -> Row:
    return {
        "processor": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
    }
