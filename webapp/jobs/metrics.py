"""A job's measurements from the database, for charts: of each step the latest attempt's, thinned so that no peak is lost.

Of a long run only the steps, peaks and losses are read of all records, and in whole those that are kept: parsing the rest would
be most of the time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db.models import FloatField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from webapp.jobs.models import Sample

DEFAULT_MAX_POINTS = 2_000
MAX_POINTS_ALLOWED = 20_000


class Point(NamedTuple):
    """What decides whether a record is kept."""

    pk: int
    peak: float | None
    loss: float | None


_PEAK, _LOSS = 1, 2

def job_metrics(job_id: str, *, max_points: int = DEFAULT_MAX_POINTS) -> dict[str, Any]:
    """``steps`` (at most ``max_points``), ``evals``, and the latest ``timeline`` or None; of a generate job ``generated``."""
    timeline = Sample.objects.filter(job_id=job_id, kind="timeline").order_by("-attempt", "-step").first()
    return {
        "steps": _records(thinned(_latest(job_id, "step"), max_points=max_points)),
        "evals": _records(_latest(job_id, "eval")),
        "generated": _records(thinned(_latest(job_id, "generate"), max_points=max_points)),
        "timeline": timeline.data if timeline else None,
    }


def thinned(points: Sequence[Point], *, max_points: int) -> Sequence[Point]:
    """Of each run of neighbours those with the highest peak and the highest loss; the last one always."""
    if len(points) <= max_points or max_points < 3:
        return points[-max_points:] if max_points < len(points) else points
    length = -(-len(points) // ((max_points - 1) // 2))
    kept: list[Point] = []
    for start in range(0, len(points), length):
        run = points[start : start + length]
        highest = {run.index(max(run, key=lambda point: _number(point[field]))) for field in (_PEAK, _LOSS)}
        kept += [run[index] for index in sorted(highest)]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _latest(job_id: str, kind: str) -> list[Point]:
    """In the order of the steps."""
    rows = Sample.objects.filter(job_id=job_id, kind=kind).order_by("attempt", "step")
    rows = rows.annotate(peak=_read("device_peak_bytes"), loss=_read("loss"))
    by_step = {step: Point(pk, peak, loss) for step, pk, peak, loss in rows.values_list("step", "pk", "peak", "loss")}
    return [by_step[step] for step in sorted(by_step)]


def _read(key: str) -> Cast:
    return Cast(KeyTextTransform(key, "data"), FloatField())


def _records(points: Sequence[Point]) -> list[dict[str, Any]]:
    """What was sent of them, in their order."""
    found = dict(Sample.objects.filter(pk__in=[point.pk for point in points]).values_list("pk", "data"))
    return [found[point.pk] for point in points]


def _number(value: float | None) -> float:
    return float("-inf") if value is None else value
