"""Jobs side by side: what differs in what was asked and decided, what came of it, and what each decision cost.

The first job is what the others are held against. A price is the estimate of the first job with one thing taken from the other:
a decision of its plan, a number of its work, its machine. So prices of several do not add up to the whole difference.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.plan.explain.diff import different_cells
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from webapp.jobs.models import Job, Kind
from webapp.jobs.queries import jobs_visible_to
from webapp.planning.runs.comparing_costs import AnyPlan, DecisionCost, price_differences

MIN_JOBS, MAX_JOBS = 2, 10
Unit = Literal["bytes", "ms", "s", "per_s", "number"]
Group = Literal["setting", "plan"]
_ID = re.compile(r"[a-z0-9_]{1,48}")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing on which the jobs do not agree; values in their order, None where a job has none."""

    group: Group
    name: str
    """``workload.sequence_length``; of plans ``activations, place``."""
    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One number of each job, None where it was not measured."""

    name: str
    unit: Unit
    values: tuple[float | None, ...]
    lower_is_better: bool | None
    """None where neither is."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compare two jobs or more."""

    jobs: tuple[Job, ...]
    differences: tuple[Difference, ...]
    outcomes: tuple[Outcome, ...]
    costs: tuple[DecisionCost, ...]
    unpriced: str
    """Why decisions have no price; empty where they have."""


def read_jobs(user: Any, wanted: Sequence[str]) -> list[Job]:
    """In the order asked for, each once. Raises InvalidInput for too few, too many, or one that is not there."""
    names = list(dict.fromkeys(wanted))
    if not MIN_JOBS <= len(names) <= MAX_JOBS:
        raise InvalidInput(
            f"{len(names)} jobs are named; allowed: {MIN_JOBS} to {MAX_JOBS} different ones",
            field="jobs",
            value=len(names),
            allowed={"minimum": MIN_JOBS, "maximum": MAX_JOBS},
        )
    # what is no id is asked of no database: PostgreSQL fails on a NUL
    ids = [name for name in names if _ID.fullmatch(name)]
    found = jobs_visible_to(user).select_related("model", "dataset", "machine").in_bulk(ids)
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise InvalidInput(
            f"job {missing[:80]!r} is not there", field="jobs", value=missing[:80], allowed="ids of GET /jobs"
        )
    return [found[name] for name in names]


def compare_jobs(jobs: Sequence[Job]) -> Comparison:
    plans = [_plan_of(job) for job in jobs]
    costs, unpriced = price_differences(jobs, plans)
    return Comparison(
        jobs=tuple(jobs),
        differences=(*_setting_differences(jobs), *_plan_differences(plans)),
        outcomes=tuple(_outcomes(jobs)),
        costs=costs,
        unpriced=unpriced,
    )


# What was asked, and what was decided.


def _setting_differences(jobs: Sequence[Job]) -> Iterator[Difference]:
    """A setting that only some kinds of job have is a difference only where jobs of those kinds differ."""
    settings = [(job.kind, dict(_settings(job))) for job in jobs]
    names = dict.fromkeys(name for _, setting in settings for name in setting)
    for name in names:
        kinds = {kind for kind, setting in settings if name in setting}
        asked = [setting.get(name) for kind, setting in settings if kind in kinds]
        if any(value != asked[0] for value in asked):
            yield Difference(group="setting", name=name, values=tuple(setting.get(name) for _, setting in settings))


def _settings(job: Job) -> Iterator[tuple[str, Any]]:
    """Flat, with names for what the spec knows by id."""
    yield "kind", job.kind
    yield "model", job.model.name
    yield "dataset", job.dataset.name if job.dataset else None
    yield "machine", job.machine.name if job.machine else None
    for part in ("workload", "goal"):
        yield from _flat(job.spec.get(part) or {}, path=part)


def _flat(document: Mapping[str, Any], *, path: str) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, path=f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def _plan_differences(plans: Sequence[AnyPlan | None]) -> Iterator[Difference]:
    """Differences between plans of one kind; training and generation decide about different things."""
    known = [plan for plan in plans if plan is not None]
    training = [plan for plan in known if isinstance(plan, Plan)]
    if training and len(training) < len(known):
        return
    for category, aspect, cells in _training_cells(training) if training else _generation_cells(known):
        values = iter(cells)
        found = tuple(None if plan is None else next(values) for plan in plans)
        yield Difference(group="plan", name=f"{category}, {aspect}", values=found)


def _training_cells(plans: Sequence[Plan]) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    for cell in different_cells(plans):
        yield cell.category, cell.aspect, cell.values


def _generation_cells(plans: Sequence[AnyPlan]) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    tables = [dict(_flat(plan.to_json(), path="")) for plan in plans]
    for name in dict.fromkeys(name for table in tables for name in table):
        cells = tuple(table.get(name) for table in tables)
        if len(set(map(str, cells))) > 1:
            category, _, aspect = name.lstrip(".").partition(".")
            yield category, aspect.replace("_", " ") or "number", cells


def _plan_of(job: Job) -> AnyPlan | None:
    """None where there is none, or it is of a form that this version does not read."""
    if job.plan is None:
        return None
    try:
        return GenerationPlan.from_json(job.plan) if job.kind == Kind.GENERATE else Plan.from_json(job.plan)
    except HeadroomError:
        return None


# What came of it.


def _outcomes(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Those that any of the jobs has."""
    kinds: tuple[tuple[str, Unit, str, str, bool | None], ...] = (
        ("predicted peak", "bytes", "prediction", "device_peak_bytes", True),
        ("measured peak", "bytes", "summary", "device_peak_bytes", True),
        ("predicted step", "ms", "prediction", "step_ms", True),
        ("measured step", "ms", "summary", "step_ms", True),
        ("predicted first token", "ms", "prediction", "prefill_ms", True),
        ("measured first token", "ms", "summary", "prefill_ms", True),
        ("predicted later token", "ms", "prediction", "decode_ms", True),
        ("measured later token", "ms", "summary", "decode_ms", True),
        ("tokens per second", "per_s", "summary", "tokens_per_s", False),
        ("training loss", "number", "summary", "loss", True),
        ("validation loss", "number", "summary", "validation_loss", True),
    )
    for name, unit, source, key, lower_is_better in kinds:
        values = tuple(_number((getattr(job, source) or {}).get(key)) for job in jobs)
        yield from _if_any_known(Outcome(name=name, unit=unit, values=values, lower_is_better=lower_is_better))
    seconds = tuple(_seconds(job) for job in jobs)
    yield from _if_any_known(Outcome(name="run time", unit="s", values=seconds, lower_is_better=True))
    steps = tuple(float(job.step) for job in jobs)
    yield Outcome(name="steps done", unit="number", values=steps, lower_is_better=None)


def _if_any_known(outcome: Outcome) -> Iterator[Outcome]:
    if any(value is not None for value in outcome.values):
        yield outcome


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _seconds(job: Job) -> float | None:
    if job.started_at is None or job.finished_at is None:
        return None
    return (job.finished_at - job.started_at).total_seconds()
