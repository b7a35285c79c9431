"""First pictures of the job page: device memory within a step and over the run, and the loss.

Drawn from the samples that the charts of ``static/js/charts.js`` are drawn from, with the same ranges, so that nothing jumps
when those take their place. How the loss is drawn otherwise (smoothed, logarithmic, over tokens) is theirs alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from optimizer.base.categories import CATEGORIES
from optimizer.base.units import GIB, MIB, format_bytes
from webapp.jobs.metrics import job_metrics
from webapp.jobs.models import Job
from webapp.pages.pictures.picture import Area, Axis, Line, Mark, Note, Picture, area_path, line_path, step_path
from webapp.pages.templatetags.headroom import figure
from webapp.pages.words.plan_names import devices_differ

MAX_POINTS: Final = 240
"""Points of a curve at most: about one for every two pixels."""
MAX_MARKS: Final = 60

Sizes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class JobPictures:
    """None where nothing is known yet that could be drawn."""

    memory: Picture | None
    strip: Picture | None
    loss: Picture | None


def job_pictures(job: Job, *, budget_bytes: int | None) -> JobPictures:
    """Reads the job's samples once, thinned."""
    found = job_metrics(job.pk, max_points=MAX_POINTS)
    common: dict[str, Any] = {"prediction": _of_first_device(job), "budget_bytes": budget_bytes}
    if job.makes_tokens:
        over_run = memory_over_run(found["generated"], **common, unit="token")
        return JobPictures(memory=over_run, strip=None, loss=None)
    # a run that ended before its last step is drawn as far as it came
    num_steps = 0 if job.is_terminal else job.num_steps
    return JobPictures(
        memory=memory_within_step(found["timeline"], **common),
        strip=memory_over_run(found["steps"], **common, num_steps=num_steps, name="strip"),
        loss=loss_picture(found["steps"], found["evals"], num_steps=num_steps),
    )


def _of_first_device(job: Job) -> Mapping[str, Any] | None:
    """The prediction of what is measured from within; of devices that hold different things that is the first one's peak, whose
    course nobody predicts.
    """
    prediction: Mapping[str, Any] | None = job.prediction
    peaks = (prediction or {}).get("rank_peak_bytes")
    if prediction is None or not peaks or not devices_differ(job.plan or {}):
        return prediction
    return {**prediction, "device_peak_bytes": peaks[0], "timeline": []}


def memory_within_step(
    record: Mapping[str, Any] | None, *, prediction: Mapping[str, Any] | None, budget_bytes: int | None
) -> Picture | None:
    """The newest step measured from within, stacked, and the predicted one dashed; each in percent of its own length."""
    measured = _highest_of_stretches((record or {}).get("points") or [])
    predicted = [
        (moment["offset_ms"], sum(moment["bytes_by_category"].values()))
        for moment in (prediction or {}).get("timeline", ())
    ]
    if not measured and not predicted:
        return None
    peaks = [sum(sizes.values()) for _, sizes in measured]
    scale = _MemoryScale(
        used_bytes=max([*peaks, (prediction or {}).get("device_peak_bytes", 0), 1]), budget_bytes=budget_bytes
    )
    x, y = Axis(low=0, high=100, title="percent of the step"), scale.axis()
    lines = [Line(name="predicted", path=step_path(_in_percent(predicted), x=x, y=y))] if predicted else []
    over = f"step {record['step']:,}, {len(record['points'])} moments" if record and measured else ""
    return Picture(
        name="memory",
        summary=_memory_summary(max(peaks, default=0), prediction, budget_bytes, over=over)
        if over
        else "No step has been measured from within yet; the dashed line is the prediction.",
        x=x,
        y=y,
        areas=_stack(_in_percent(measured), x=x, y=y, is_stepped=True),
        lines=(*lines, *scale.lines),
        notes=scale.notes,
    )


def memory_over_run(
    samples: Sequence[Mapping[str, Any]],
    *,
    prediction: Mapping[str, Any] | None,
    budget_bytes: int | None,
    num_steps: int = 0,
    unit: str = "step",
    name: str = "memory",
) -> Picture | None:
    """Bytes at each point's peak, stacked, with the predicted peak; None before anything is measured or predicted."""
    if not samples and not prediction:
        return None
    peak_bytes = max([sample.get("device_peak_bytes") or 0 for sample in samples], default=0)
    predicted_bytes = (prediction or {}).get("device_peak_bytes", 0)
    scale = _MemoryScale(used_bytes=max(peak_bytes, predicted_bytes), budget_bytes=budget_bytes)
    end = max(num_steps, samples[-1]["step"] if samples else 0, 1)
    is_strip = name == "strip"
    x = Axis(low=0, high=end, title=unit, has_ticks=not is_strip and bool(samples or num_steps))
    y = scale.axis(has_ticks=not is_strip)
    points = [(sample["step"], sample.get("device_bytes") or {}) for sample in samples]
    # one moment alone is drawn up to there: an area has no width at a point
    points = [(0, points[0][1]), *points] if len(points) == 1 else points
    lines = (
        [Line(name="predicted", path=line_path([(0, predicted_bytes), (end, predicted_bytes)], x=x, y=y))]
        if prediction
        else []
    )
    return Picture(
        name=name,
        summary=_memory_summary(peak_bytes, prediction, budget_bytes, over=f"{len(samples)} points"),
        x=x,
        y=y,
        areas=_stack(points, x=x, y=y, is_stepped=False),
        lines=(*lines, *scale.lines),
        notes=() if is_strip else scale.notes,
    )


def loss_picture(
    steps: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], *, num_steps: int
) -> Picture | None:
    """Training and validation loss over the steps, and the learning rate on an axis of its own."""
    training = _finite(steps, "loss")
    validation = _finite(evals, "validation_loss")
    rates = _finite(steps, "learning_rate")
    if len(training) < 2:
        return None
    values = [value for _, value in (*training, *validation)]
    low, high = min(values), max(values)
    air = 0.06 * (high - low or abs(high) or 1)
    x = Axis(low=0, high=max(num_steps, int(training[-1][0]), 1), title="step")
    y = Axis(low=low - air, high=high + air, is_upright=True)
    right = Axis(
        low=0, high=1.06 * max([rate for _, rate in rates], default=0) or 1, is_upright=True, is_scientific=True
    )
    lines = [
        Line(name="training", path=line_path(training, x=x, y=y), label="training"),
        Line(name="validation", path=line_path(validation, x=x, y=y), label="validation" if validation else ""),
        Line(name="rate", path=line_path(rates, x=x, y=right), label="learning rate" if rates else ""),
    ]
    stride = -(-len(validation) // MAX_MARKS) or 1
    return Picture(
        name="loss",
        summary=_loss_summary(training, validation, rates),
        x=x,
        y=y,
        right=right if rates else None,
        lines=tuple(line for line in lines if line.path or line.label),
        marks=tuple(
            Mark(name="validation", x=x.percent(step), y=y.percent(loss)) for step, loss in validation[::stride]
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _MemoryScale:
    """Up to the budget, or where that is far above what is used, a quarter more than is used."""

    used_bytes: int
    budget_bytes: int | None

    @property
    def top_bytes(self) -> float:
        enough = 1.25 * self.used_bytes
        if not self.budget_bytes:
            return max(1, self.used_bytes)
        return max(self.used_bytes, self.budget_bytes) if self.budget_bytes <= enough or not self.used_bytes else enough

    def axis(self, *, has_ticks: bool = True) -> Axis:
        is_large = self.top_bytes >= 2 * GIB
        return Axis(
            low=0,
            high=1.12 * self.top_bytes,
            title="GiB" if is_large else "MiB",
            unit=GIB if is_large else MIB,
            is_upright=True,
            has_ticks=has_ticks,
        )

    @property
    def lines(self) -> tuple[Line, ...]:
        if not self.budget_bytes or self.budget_bytes > self.top_bytes:
            return ()
        height = self.axis().place(self.budget_bytes)
        return (Line(name="budget", path=f"M0 {height}H1000"),)

    @property
    def notes(self) -> tuple[Note, ...]:
        """A budget above the chart is an arrow at its upper edge."""
        if not self.budget_bytes:
            return ()
        words = f"budget {format_bytes(self.budget_bytes)}"
        if self.budget_bytes > self.top_bytes:
            return (Note(text=f"▲ {words}", x="100%", y="0.0%", is_at_top=True),)
        return (Note(text=words, x="100%", y=self.axis().percent(self.budget_bytes)),)


def _stack(points: Sequence[tuple[float, Sizes]], *, x: Axis, y: Axis, is_stepped: bool) -> tuple[Area, ...]:
    """Each category up to the sum of those below it and its own, so that those in front cover what is not theirs."""
    present = [category for category in CATEGORIES if any(sizes.get(category) for _, sizes in points)]
    reached = [0] * len(points)
    areas = []
    for category in present:
        reached = [below + sizes.get(category, 0) for below, (_, sizes) in zip(reached, points, strict=True)]
        curve = [(along, top) for (along, _), top in zip(points, reached, strict=True)]
        areas.append(Area(category=category, path=area_path(curve, x=x, y=y, is_stepped=is_stepped)))
    return tuple(area for area in reversed(areas) if area.path)


def _highest_of_stretches(points: Sequence[tuple[float, Sizes]]) -> list[tuple[float, Sizes]]:
    """At most ``MAX_POINTS`` moments; of each run of neighbours the one with most bytes, and the last one."""
    stride = -(-len(points) // MAX_POINTS) or 1
    runs = [points[start : start + stride] for start in range(0, len(points), stride)]
    kept = [max(run, key=lambda moment: sum(moment[1].values())) for run in runs]
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def _in_percent(points: Sequence[tuple[float, Any]]) -> list[tuple[float, Any]]:
    length = max(points[-1][0], 1e-9) if points else 1
    return [(100 * offset_ms / length, value) for offset_ms, value in points]


def _finite(records: Iterable[Mapping[str, Any]], field: str) -> list[tuple[float, float]]:
    found = [(record["step"], record.get(field)) for record in records]
    return [(step, float(value)) for step, value in found if isinstance(value, int | float) and isfinite(value)]


def _memory_summary(
    peak_bytes: int, prediction: Mapping[str, Any] | None, budget_bytes: int | None, *, over: str
) -> str:
    parts = [f"Device memory over {over}: measured peak {format_bytes(peak_bytes)}"]
    parts += [f"predicted {format_bytes(prediction['device_peak_bytes'])}"] if prediction else []
    parts += [f"budget {format_bytes(budget_bytes)}"] if budget_bytes else []
    return f"{', '.join(parts)}."


def _loss_summary(
    training: Sequence[tuple[float, float]],
    validation: Sequence[tuple[float, float]],
    rates: Sequence[tuple[float, float]],
) -> str:
    words = (
        f"Training loss went from {figure(training[0][1])} to {figure(training[-1][1])} by step {training[-1][0]:.0f}"
    )
    if validation:
        words += f", validation {figure(validation[0][1])} to {figure(validation[-1][1])}"
    return f"{words}; the learning rate is at {figure(rates[-1][1])}." if rates else f"{words}."
