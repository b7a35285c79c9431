"""A job's measurements from the database, for charts: of each step the latest attempt's, thinned so that no peak is lost."""

from typing import Any

from webapp.jobs.models import Sample

DEFAULT_MAX_POINTS = 2_000
MAX_POINTS_ALLOWED = 20_000


def job_metrics(job_id: str, *, max_points: int = DEFAULT_MAX_POINTS) -> dict[str, Any]:
    """``steps`` (at most ``max_points``), ``evals``, and the latest ``timeline`` or None."""
    timeline = Sample.objects.filter(job_id=job_id, kind="timeline").order_by("-attempt", "-step").first()
    return {
        "steps": thinned(_latest(job_id, "step"), max_points=max_points),
        "evals": _latest(job_id, "eval"),
        "timeline": timeline.data if timeline else None,
    }


def thinned(records: list[dict[str, Any]], *, max_points: int) -> list[dict[str, Any]]:
    """Of each run of neighbours the records with the highest peak and the highest loss; the last record always."""
    if len(records) <= max_points or max_points < 3:
        return records[-max_points:] if max_points < len(records) else records
    run = -(-len(records) // ((max_points - 1) // 2))
    kept: list[dict[str, Any]] = []
    for start in range(0, len(records), run):
        neighbours = records[start : start + run]
        peak = max(neighbours, key=lambda record: _number(record.get("device_peak_bytes")))
        loss = max(neighbours, key=lambda record: _number(record.get("loss")))
        kept += [peak] if peak is loss else sorted((peak, loss), key=lambda record: int(record["step"]))
    return kept if kept[-1] is records[-1] else [*kept, records[-1]]


def _latest(job_id: str, kind: str) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    rows = Sample.objects.filter(job_id=job_id, kind=kind).order_by("attempt", "step").values_list("step", "data")
    for step, data in rows.iterator():
        by_step[step] = data
    return [by_step[step] for step in sorted(by_step)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("-inf")
