"""Prints the sweep and the regret of a result file as tables for ``docs/experiments.md``.

    python -m benchmarks.search.table FILE
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.record import Row
from benchmarks.search.sweep_summary import BELOW, by_model, won_back
from optimizer.base.units import format_bytes

_POINTS = (
    "budget", "of plain", "peak", "plan", "over plain", "full recompute", "best that fits", "ours over it", "fused", "over it",
)  # fmt: skip
_BASELINES = ("baseline", "peak", "of plain", "over plain")
_JOBS = ("model", "shape", "forbidden", "budget", "peak", "plan", "ms", "best rival", "ours over it")


def main() -> None:
    rows: list[Row] = json.loads(Path(sys.argv[1]).read_text())["rows"]
    for line in lines_of(rows):
        print(line)


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown."""
    points = [row for row in rows if row["what"] == "point" and row["finished"]]
    for group in by_model(points):
        model = group[0]["model"]
        baselines = [row for row in rows if row["what"] == "baseline" and row["model"] == model and "peak_bytes" in row]
        yield f"\n{model}\n"
        yield from _table(_BASELINES, [_baseline(row, baselines[0]["peak_bytes"]) for row in baselines])
        for levers in dict.fromkeys(point["levers"] for point in group):
            chosen = [point for point in group if point["levers"] == levers]
            share = None if levers == BELOW else won_back(chosen)
            yield f"\n{model}, {levers}" + ("" if share is None else f": {share:.0%} won back") + "\n"
            yield from _table(_POINTS, [_point(point) for point in chosen])
    jobs = [row for row in rows if row["what"] == "job" and row["finished"]]
    if jobs:
        yield "\nregret\n"
        yield from _table(_JOBS, [_job(job) for job in jobs])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _baseline(row: Row, plain_bytes: int) -> list[str]:
    peak_bytes = row["peak_bytes"]
    return [row["name"], format_bytes(peak_bytes), f"{peak_bytes / plain_bytes:.2f}", f"{row['over_plain'] - 1:+.1%}"]


def _point(row: Row) -> list[str]:
    return [
        format_bytes(row["budget_bytes"]),
        f"{row['share']:.2f}",
        format_bytes(row["peak_bytes"]),
        row["plan"],
        f"{row['over_plain'] - 1:+.1%}",
        f"{row['full_over_plain'] - 1:+.1%}",
        row["best"] or "none",
        f"{row['over_best'] - 1:+.1%}" if "over_best" in row else "",
        row["fused"] or "none",
        f"{row['over_fused'] - 1:+.1%}" if "over_fused" in row else "",
    ]


def _job(row: Row) -> list[str]:
    return [
        row["model"],
        row["shape"],
        row["forbid"] or "nothing",
        format_bytes(row["budget_bytes"]),
        format_bytes(row["peak_bytes"]),
        row["plan"],
        str(row.get("ms", "")),
        row["best"] or "none",
        f"{row['over_best'] - 1:+.1%}" if "over_best" in row else "",
    ]


if __name__ == "__main__":
    main()
