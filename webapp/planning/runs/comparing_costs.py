"""Prices each difference between jobs, in bytes and speed: the first job priced again with one thing taken from another.

Of settings only those are priced that can change bytes or time (``PRICED_SETTINGS``) and the machine; a thing that the first job
cannot take alone, or not at all, has no price.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from optimizer.api.compiled_needs import compiled_representations
from optimizer.api.shared_needs import shared_number
from optimizer.base.errors import HeadroomError
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.profile import Profile
from optimizer.workload import GenerationWorkload
from webapp.catalog.models import Machine
from webapp.jobs.models import Job, Kind
from webapp.jobs.specs.generation import generation_workload, spec_of_job
from webapp.jobs.specs.training import read_goal, read_workload
from webapp.planning.search.profiles import known_generation_profile_of, known_profile_of

AnyPlan = Plan | GenerationPlan
PRICED_SETTINGS = ("sequence_length", "global_batch_size", "optimizer", "momentum", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class DecisionCost:
    """The predicted effect of one thing of another job on the first job."""

    job_index: int
    decision: str
    """A row of the plan (``activations``), or a setting by its name (``workload.sequence_length``, ``machine``)."""
    device_change_bytes: int
    step_change_ms: float
    """Milliseconds of a step; of a generation, of each token."""
    tokens_per_s_change: float

    @property
    def is_nothing(self) -> bool:
        return not (self.device_change_bytes or self.step_change_ms or self.tokens_per_s_change)


class _Priced(Protocol):
    """The fields that predictions of both kinds have."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The subject of a price: a plan, the work as in a spec, a machine."""

    plan: Mapping[str, Any]
    work: Mapping[str, Any]
    machine: Machine


def price_differences(
    jobs: Sequence[Job], plans: Sequence[AnyPlan | None]
) -> tuple[tuple[DecisionCost, ...], str]:
    """Costs of every other job against the first; and the reason where there are none."""
    first, plan = jobs[0], plans[0]
    if plan is None or first.machine is None:
        return (), "The first job has no plan for a known machine."
    estimate = _estimator(first, others=plans[1:])
    if estimate is None:
        return (), "The first job's model has no profile of this version; price a job of it to have one made."
    mine = _Case(plan=plan.to_json(), work=first.spec.get("workload") or {}, machine=first.machine)
    before = estimate(mine)
    if before is None:
        return (), "The first job's plan cannot be priced by this version."
    costs: list[DecisionCost] = []
    for index, (job, other) in enumerate(zip(jobs[1:], plans[1:], strict=True), start=1):
        for name, case in _changed(mine, job, other if type(other) is type(plan) else None):
            if (after := estimate(case)) is not None:
                costs.append(_cost(index, name, before, after))
    return tuple(cost for cost in costs if cost.decision in plan.to_json() or not cost.is_nothing), ""


def _changed(mine: _Case, job: Job, plan: AnyPlan | None) -> Iterator[tuple[str, _Case]]:
    """The first job with one thing of the other's, for each that differs."""
    theirs = plan.to_json() if plan is not None else {}
    for decision, wanted in theirs.items():
        if wanted != mine.plan.get(decision):
            yield decision, _with(mine, plan={**mine.plan, decision: wanted})
    work = job.spec.get("workload") or {}
    for name in PRICED_SETTINGS:
        if name in work and work[name] != mine.work.get(name):
            # a batch is cut into micro-batches, so it takes theirs along
            cut = {"batch": theirs["batch"]} if name == "global_batch_size" and "batch" in theirs else {}
            yield f"workload.{name}", _with(mine, plan={**mine.plan, **cut}, work={**mine.work, name: work[name]})
    if job.machine is not None and job.machine.pk != mine.machine.pk:
        yield "machine", _with(mine, machine=job.machine)


def _with(case: _Case, **changes: Any) -> _Case:
    return _Case(**{"plan": case.plan, "work": case.work, "machine": case.machine, **changes})


def _cost(index: int, name: str, before: _Priced, after: _Priced) -> DecisionCost:
    return DecisionCost(
        job_index=index,
        decision=name,
        device_change_bytes=after.device_peak_bytes - before.device_peak_bytes,
        step_change_ms=_step_ms(after) - _step_ms(before),
        tokens_per_s_change=after.tokens_per_s - before.tokens_per_s,
    )


def _step_ms(found: Any) -> float:
    """A step of training, a token of a generation."""
    return float(found.step_ms if hasattr(found, "step_ms") else found.decode_ms)


def _estimator(first: Job, *, others: Sequence[AnyPlan | None]) -> Callable[[_Case], _Priced | None] | None:
    """Prices cases of the first job's model and kind; None where its profile is not there. Raises InvalidInput.

    others: plans of the other jobs. Where one has compiled blocks, a profile that holds those is taken if it is there.
    """
    if first.kind == Kind.GENERATE:
        generates = known_generation_profile_of(first.model)
        if generates is None:
            return None
        return partial(_price_generation, generates, generation_workload(spec_of_job(first)))
    plan = None if first.plan is None else Plan.from_json(first.plan)
    goal, workload = read_goal(first.spec["goal"]), read_workload(first.spec["workload"])
    compiled = compiled_representations(workload, goal.pins, goal.may_use, ran=plan)
    sharing = shared_number(goal.pins, ran=plan)
    profile = known_profile_of(first.model, workload, compiled=compiled, sharing=sharing)
    theirs = [other for other in others if isinstance(other, Plan) and other.kernels.blocks == "compiled"]
    if plan is not None and theirs and not compiled:
        forms = compiled_representations(workload, goal.pins, goal.may_use, ran=replace(plan, kernels=theirs[0].kernels))
        profile = known_profile_of(first.model, workload, compiled=forms) or profile
    return None if profile is None else partial(_price_training, profile)


def _price_training(profile: Profile, case: _Case) -> _Priced | None:
    try:
        return estimate_training(
            profile,
            plan=Plan.from_json(dict(case.plan)),
            workload=read_workload(dict(case.work)),
            machine=MachineSpec.from_json(case.machine.document),
            calibration=case.machine.calibration,
        )
    except HeadroomError:
        return None


def _price_generation(profile: GenerationProfile, workload: GenerationWorkload, case: _Case) -> _Priced | None:
    """The prompts stay the first job's: counting another's may take seconds."""
    try:
        return estimate_generation(
            profile,
            plan=GenerationPlan.from_json(dict(case.plan)),
            workload=workload,
            machine=MachineSpec.from_json(case.machine.document),
            calibration=case.machine.calibration,
        )
    except HeadroomError:
        return None
