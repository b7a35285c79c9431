"""Finds the next plan of a training job that ran out of memory or disk, or was probed, from what its attempts have shown.

The spec is frozen: the same work, data and seeds, the same budgets, no more loss than its goal allows. Only the plan changes, and
never to one that ran out.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from optimizer.api.compiled_needs import compiled_representations
from optimizer.api.replan import Failure, list_shortfalls, replan_profiled
from optimizer.api.replan_uneven import replan_uneven
from optimizer.api.shared_needs import shared_number
from optimizer.base.errors import HeadroomError, InvalidPlan, NoFeasiblePlan
from optimizer.base.serialize import from_json
from optimizer.base.units import format_bytes
from optimizer.estimate.job.causes import CAUSES, PASSING_CAUSES
from optimizer.estimate.job.files import NUM_KEPT
from optimizer.estimate.job.probing import probe_shortfall
from optimizer.estimate.job.shortfalls import Shortfall, known_shortfalls
from optimizer.estimate.prediction import Prediction
from optimizer.goal import Goal
from optimizer.plan.activations import KernelsPins
from optimizer.plan.explain.diff import describe_change
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.price_cache import name_work
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Machine
from webapp.jobs.documents import describe_shortages, fills_disk
from webapp.jobs.models import PLAN_REASONS, PROBED, Job, Reason
from webapp.jobs.specs.joining import joining_of
from webapp.planning.runs.learning import learn_shortfalls
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.profiles import ProfileNeed, read_profile
from webapp.planning.search.resolve import joined_place, place_of

logger = logging.getLogger(__name__)

_STAYS = "the plan stays the fastest that fits; its prediction was corrected"
_NOTHING_ELSE = "no other plan fits; the job goes on under this one"
_NOT_SEARCHED = "no other plan could be looked for; the job goes on under this one"


@dataclass(frozen=True, kw_only=True)
class NextPlan:
    """A plan that was not tried yet."""

    plan: dict[str, Any]
    prediction: dict[str, Any]
    machine: Machine
    change: str
    """Differences from the last one, in words."""


def find_next_plan(job: Job) -> NextPlan | None:
    """None while the model's profile is being made. Raises NoFeasiblePlan, ProfileFailed.

    After a probe the plan may be the one that ran, with another prediction, or with the same where the search failed.
    """
    last = job.attempts.select_related("machine").order_by("-number").first()
    machine = (last.machine if last is not None else None) or job.machine
    if machine is None or job.plan is None:
        return None
    try:
        return _search_next(job, ran=Plan.from_json(job.plan), machine=machine)
    except HeadroomError as error:
        if last is None or last.outcome != PROBED:
            raise
        logger.warning("%s was probed and keeps its plan: %s", job.pk, error)
        why = _NOTHING_ELSE if isinstance(error, NoFeasiblePlan) else _NOT_SEARCHED
        return NextPlan(plan=job.plan, prediction=job.prediction or {}, machine=machine, change=why)


def _search_next(job: Job, *, ran: Plan, machine: Machine) -> NextPlan | None:
    workload = from_json(TrainingWorkload, job.spec["workload"], path="workload")
    goal = from_json(Goal, job.spec["goal"], path="goal")
    compiled = compiled_representations(workload, goal.pins, goal.may_use, ran=ran)
    sharing = shared_number(goal.pins, ran=ran)
    profile = ready_profile(ProfileNeed.of_training(job.model, workload, compiled=compiled, sharing=sharing))
    if profile is None:
        return None
    traced = read_profile(profile.pk, profile.document_sha256)
    joining = joining_of(job.spec)
    place = place_of(machine) if joining is None else joined_place(joining)
    here: dict[str, Any] = {
        "machine": place.machine,
        "workload": workload,
        "goal": goal,
    }
    failures = failures_of(job)
    checkpoint_of = ran if has_checkpoint(job) else None
    known = _learn(job, traced, failures, machine=machine, work=name_work(profile.pk, workload), here=here)
    if ran.layout.ranks:
        uneven = replan_uneven(
            failures, traced, **here, checkpoint_of=checkpoint_of, calibration=place.calibration, known=known
        )
        return _next_plan(ran, uneven, machine)
    again = partial(
        replan_profiled,
        traced,
        machine=place.machine,
        workload=workload,
        failures=failures,
        checkpoint_of=checkpoint_of,
        calibration=machine.calibration,
        known=known,
        layout=ran.layout,
    )
    return _next_plan(ran, _fastest(again, goal, ran), machine)


def _fastest(again: Callable[..., PricedPlan], goal: Goal, ran: Plan) -> PricedPlan:
    """Blocks go on compiled where a search chose that, unless what is faster now runs them op by op. Raises NoFeasiblePlan."""
    if ran.kernels.blocks != "compiled" or goal.pins.kernels.blocks is not None:
        return again(goal=goal)
    found: list[PricedPlan] = []
    with suppress(NoFeasiblePlan, InvalidPlan):
        found.append(again(goal=replace(goal, pins=replace(goal.pins, kernels=KernelsPins(blocks="compiled")))))
    try:
        found.append(again(goal=goal))
    except NoFeasiblePlan:
        if not found:
            raise
    return min(found, key=lambda priced: priced.prediction.step_ms)


def _next_plan(ran: Plan, found: PricedPlan, machine: Machine) -> NextPlan:
    return NextPlan(
        plan=found.plan.to_json(),
        prediction=found.prediction.to_json(),
        machine=machine,
        change=describe_change(ran, found.plan) or _STAYS,
    )


def _learn(
    job: Job, profile: Profile, failures: list[Failure], *, machine: Machine, work: str, here: dict[str, Any]
) -> list[Shortfall]:
    """Shortfalls that the attempts have shown, kept with the machine where they will last; all that are known of such work."""
    shown = list_shortfalls(failures, profile, **here)
    lasting = [
        shortfall
        for failure, each in zip(failures, shown, strict=True)
        if failure.cause not in PASSING_CAUSES
        for shortfall in each
    ]
    for attempt in job.attempts.filter(outcome=PROBED):
        measured_bytes = (attempt.measured or {}).get("device_peak_bytes", 0)
        missed = probe_shortfall(Prediction.from_json(attempt.prediction), device_peak_bytes=measured_bytes)
        lasting += [missed] if missed is not None else []
    known = known_shortfalls(machine.calibration, work)
    learn_shortfalls(machine, work=work, shown=lasting)
    return [*known, *lasting]


def failures_of(job: Job) -> list[Failure]:
    """The job's attempts that ran out of memory, or of disk for their own scratch file, in order."""
    kept_bytes = sum(job.checkpoints.order_by("-pk").values_list("num_bytes", flat=True)[:NUM_KEPT])
    ran_out = job.attempts.filter(outcome__in=PLAN_REASONS).exclude(plan=None).order_by("number")
    found = []
    for attempt in ran_out:
        if attempt.outcome == Reason.DISK_FULL and not fills_disk(attempt.error, attempt.prediction):
            continue
        fields = (attempt.error or {}).get("fields") or {}
        cause = str(fields.get("cause", ""))
        failure = Failure(
            plan=Plan.from_json(attempt.plan),
            cause=cause if cause in CAUSES else "step",
            fields={**fields, "kept_bytes": kept_bytes},
        )
        found.append(failure)
    return found


def write_story(job: Job, error: NoFeasiblePlan) -> str:
    """Why a job ends for which no further plan fits: each attempt, then what would have been needed."""
    smallest, budget = error.fields["smallest_feasible_bytes"], error.fields["budget_bytes"]
    needed = f"no other plan fits {format_bytes(budget)} with what that showed; the smallest needs {format_bytes(smallest)}"
    return "; ".join([*describe_shortages(job), needed])


def has_checkpoint(job: Job) -> bool:
    """Report whether there is one of its own, or of what it goes on from."""
    return job.checkpoints.exists() or job.retry_of_id is not None or bool(job.spec.get("resume_from"))
