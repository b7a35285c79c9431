"""A job's measurements from the database, for charts: of each step the latest attempt's, thinned so that no peak is lost.

Of a long run only three numbers are read of all records (columns of ``Sample``), and in whole those that are kept: parsing the
rest would be most of the time.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, cast

from webapp.jobs.models import Sample

DEFAULT_MAX_POINTS = 2_000
MAX_POINTS_ALLOWED = 20_000
ALWAYS_REPORTED = ("kind", "attempt", "step", "time_s")

Point = tuple[int, int, float, float, float]
"""Step, primary key, and what decides whether the record is kept: peak, loss, tokens per second; -1 for what there is none of."""
_PEAK, _LOSS, _SPEED = itemgetter(2), itemgetter(3), itemgetter(4)
_EXTREMES = ((max, _PEAK), (max, _LOSS), (min, _LOSS), (min, _SPEED), (max, _SPEED), (min, _PEAK))
"""Kept of each run of neighbours, the dearest first: where few points are asked for only the first ones are."""


def job_metrics(
    job_id: str, *, max_points: int = DEFAULT_MAX_POINTS, fields: Collection[str] | None = None
) -> dict[str, Any]:
    """``steps`` (at most ``max_points``), ``evals``, and the latest ``timeline`` or None; of a generate job ``generated``.

    fields: of steps, beside ``ALWAYS_REPORTED``; None for all.
    """
    timeline = Sample.objects.filter(job_id=job_id, kind="timeline").order_by("-attempt", "-step").first()
    return {
        "steps": _records(thinned(_latest(job_id, "step"), max_points=max_points), fields),
        "evals": _records(_latest(job_id, "eval"), None),
        "generated": _records(thinned(_latest(job_id, "generate"), max_points=max_points), fields),
        "timeline": timeline.data if timeline else None,
    }


def thinned(points: Sequence[Point], *, max_points: int) -> Sequence[Point]:
    """Keep from each stretch the steps with the highest and lowest peak, loss and speed; the last one always."""
    if len(points) <= max_points:
        return points
    extremes = _EXTREMES[: max(1, max_points - 1)]
    length = -(-len(points) // max(1, (max_points - 1) // len(extremes)))
    kept: list[Point] = []
    for start in range(0, len(points), length):
        run = points[start : start + length]
        kept += sorted({choose(run, key=value) for choose, value in extremes})
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _latest(job_id: str, kind: str) -> list[Point]:
    """In the order of the steps."""
    rows = Sample.objects.filter(job_id=job_id, kind=kind).order_by("attempt", "step")
    points = cast(list[Point], list(rows.values_list("step", "pk", "peak_bytes", "loss", "tokens_per_s")))
    if any(None in point for point in points):
        points = [cast(Point, tuple(-1 if number is None else number for number in point)) for point in points]
    if all(point[0] < after[0] for point, after in pairwise(points)):
        return points  # one attempt, or each went on exactly where the one before stood
    by_step = {point[0]: point for point in points}
    return [by_step[step] for step in sorted(by_step)]


def _records(points: Sequence[Point], fields: Collection[str] | None) -> list[dict[str, Any]]:
    """The fields that were sent, in their order."""
    found = dict(Sample.objects.filter(pk__in=[pk for _, pk, *_ in points]).values_list("pk", "data"))
    records: list[dict[str, Any]] = [found[pk] for _, pk, *_ in points]
    if fields is None:
        return records
    wanted = (*ALWAYS_REPORTED, *fields)
    return [{name: record[name] for name in wanted if name in record} for record in records]
