"""Finds the next plan of a job whose last one ran out of memory: never one that was tried, within the same goal.

Torch-free. ``estimate/job/causes.py`` names why an attempt ran out, ``shortfalls.py`` says by how much a stage was predicted too
low; here the search is asked again with both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimizer.api.keep_form import keep_form
from optimizer.base.errors import NoFeasiblePlan
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.job.moments import predict_moments
from optimizer.estimate.job.shortfalls import (
    EVERY_STAGE,
    Shortfall,
    ShortTier,
    find_shortfalls,
    merge_shortfalls,
    toward_likely,
)
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.estimate.uneven import list_cases
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import count_sharing, share_of
from optimizer.plan.devices.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.core import search
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.questions.price_cache import PriceMemory
from optimizer.search.training import budgets_of_rank, training_problem, with_shortfalls
from optimizer.workload import TrainingWorkload

LIKELY_SHARES = (1.0, 0.3, 0.0)
"""Parts of the way from what was seen to what is likely; a plan is asked to leave free as much as one can."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One attempt that ran out of memory, or of room on the disk."""

    plan: Plan
    cause: str
    """One of ``causes.CAUSES``."""
    fields: Mapping[str, Any]
    """Those of the error, with what the run added; of a full disk also ``kept_bytes``, of checkpoints that lie there."""


def list_shortfalls(
    failures: Sequence[Failure], profile: Profile, *, machine: Machine, workload: TrainingWorkload, goal: Goal
) -> list[tuple[Shortfall, ...]]:
    """The shortfalls that each of these attempts, in order, has shown, against what is predicted of its plan now."""
    found: list[tuple[Shortfall, ...]] = []
    for failure in failures:
        here = _find_case(profile, failure, workload=workload, machine=machine)
        device = _kind_that_ran_out(failure)
        shown = find_shortfalls(
            failure.fields,
            prediction=_predict_stages(profile, **here),
            moments=predict_moments(profile, **here),
            cause=failure.cause,
            budgets=_find_budgets(goal, here["machine"], failure.plan),
            on_host=machine.device.kind == "cpu",
            num_sharing=count_sharing(machine, num_ranks=failure.plan.layout.num_devices),
            earlier=[each for before in found for each in before if each.device in ("", device)],
        )
        found.append(tuple(replace(each, device=device) if each.tier == "device" else each for each in shown))
    return found


def _find_case(profile: Profile, failure: Failure, *, workload: TrainingWorkload, machine: Machine) -> dict[str, Any]:
    """Find the case to price of a plan: of ranks that differ the one that ran out, as if all were like it; where that is not
    known the one whose device has the least room, or after the host's killer the one that has the most on the host.
    """
    plan, rank = failure.plan, failed_rank(failure)
    if not plan.layout.ranks:
        return {"plan": plan, "workload": workload, "machine": machine}
    cases: list[dict[str, Any]] = [
        {"plan": case.plan, "workload": case.workload, "machine": case.machine} for case in list_cases(plan, workload, machine)
    ]
    if rank is None and failure.cause == "host_killed":
        return max(cases, key=lambda case: estimate_training(profile, **case).host_peak_bytes)
    if rank is None:
        rank = estimate_training(profile, plan=plan, workload=workload, machine=machine).fullest_rank or 0
    return cases[rank]


def failed_rank(failure: Failure) -> int | None:
    """The rank that ran out, as the error of an attempt on several devices names it; None where it names none."""
    rank = failure.fields.get("rank")
    return rank if isinstance(rank, int) and 0 <= rank < failure.plan.layout.num_devices else None


def _kind_that_ran_out(failure: Failure) -> str:
    """The kind of the rank's device, where ranks differ and it is known which it was."""
    ranks, rank = failure.plan.layout.ranks, failed_rank(failure)
    return ranks[rank].device if ranks and rank is not None else ""


def _find_budgets(goal: Goal, machine: Machine, plan: Plan) -> dict[ShortTier, int]:
    """Bytes that a rank may take by tier: of a device that differs from others no more than there is."""
    num_ranks, device_bytes = plan.layout.num_devices, goal.device_budget_bytes
    elsewhere = budgets_of_rank(goal, share_of(machine, num_ranks=num_ranks), num_ranks=num_ranks)
    return {
        "device": min(device_bytes, machine.device.memory_bytes) if plan.layout.ranks else device_bytes,
        "host": elsewhere["host_budget_bytes"],
        "disk": elsewhere["disk_budget_bytes"],
    }


def _predict_stages(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> Prediction:
    """The plan's prediction with its memory and all stages."""
    here: dict[str, Any] = {"plan": plan, "workload": workload, "machine": machine}
    return add_memory(estimate_training(profile, **here), profile, **here)


def replan_profiled(
    profile: Profile,
    *,
    machine: Machine,
    workload: TrainingWorkload,
    goal: Goal,
    failures: Sequence[Failure],
    checkpoint_of: Plan | None,
    calibration: Mapping[str, Any] | None = None,
    known: Sequence[Shortfall] = (),
    layout: DeviceLayout = ONE_DEVICE,
) -> PricedPlan:
    """The fastest plan that fits with all that the failed attempts have shown.

    checkpoint_of: the plan under which the checkpoint was made that the next attempt goes on from, whose form of weights and
    optimizer state must stay. known: further shortfalls of this work on this machine. layout: the devices that the plan before
    ran on, which stays. Raises NoFeasiblePlan.
    """
    if checkpoint_of is not None:
        goal = keep_form(goal, checkpoint_of, has_adapter=workload.adapter is not None)
    tried = [failure.plan for failure in failures]
    listed = list_shortfalls(failures, profile, machine=machine, workload=workload, goal=goal)
    shown = [shortfall for each in listed for shortfall in each]

    problem = training_problem(
        profile, workload=workload, goal=goal, machine=machine, calibration=calibration, layout=layout
    )
    problem = PriceMemory().bind(replace(problem, names_ways=False))

    def pose(shortfalls: Sequence[Shortfall]) -> SearchProblem:
        return with_shortfalls(problem, profile, shortfalls, machine=machine)

    for share in LIKELY_SHARES[:-1]:
        try:
            return _search_untried(pose, merge_shortfalls([*known, *toward_likely(shown, share)]), tried=tried)
        except NoFeasiblePlan:
            continue
    return _search_untried(pose, merge_shortfalls([*known, *toward_likely(shown, LIKELY_SHARES[-1])]), tried=tried)


def _search_untried(
    pose: Callable[[Sequence[Shortfall]], SearchProblem], shortfalls: Sequence[Shortfall], *, tried: Sequence[Plan]
) -> PricedPlan:
    while True:
        problem = pose(shortfalls)
        chosen = search(problem).chosen
        if chosen.plan not in tried:
            return chosen
        left_bytes = problem.goal.device_budget_bytes - chosen.prediction.device_peak_bytes
        shortfalls = (*shortfalls, Shortfall(stage=EVERY_STAGE, tier="device", num_bytes=left_bytes + 1))
