"""The same as ``replan.py`` where the machine's devices are of several kinds: each kind that ran out leaves more of itself free.

A shortfall is taken off all stages of the kind at once, since the devices' shares of the work are found by many small searches.
Torch-free.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optimizer.api.keep_form import keep_form
from optimizer.api.replan import LIKELY_SHARES, Failure, failed_rank, list_shortfalls
from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.estimate.job.shortfalls import EVERY_STAGE, Shortfall, shortfall_on, toward_likely
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.uneven.answer import answer_uneven
from optimizer.search.questions.uneven.spared import with_less_elsewhere
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload


def replan_uneven(
    failures: Sequence[Failure],
    profile: Profile,
    workload: TrainingWorkload,
    goal: Goal,
    *,
    machine: Machine,
    checkpoint_of: Plan | None,
    calibration: Mapping[str, Any] | None = None,
    known: Sequence[Shortfall] = (),
) -> PricedPlan:
    """The fastest plan on any of the machine's devices that was not tried, with room for what the failed attempts have shown.

    checkpoint_of, known: as ``replan_profiled`` has them. Raises NoFeasiblePlan.
    """
    if checkpoint_of is not None:
        goal = keep_form(goal, checkpoint_of, has_adapter=workload.adapter is not None)
    tried = [failure.plan for failure in failures]
    here: dict[str, Any] = {"machine": machine, "workload": workload, "goal": goal}
    listed = list_shortfalls(failures, profile, **here)
    least = [
        each
        for failure, shown in zip(failures, listed, strict=True)
        if any(found.tier == "device" for found in shown)
        for each in _room_that_was_left(failure, profile, **here)
    ]
    for share in LIKELY_SHARES:
        shown = [toward_likely(each, share) for each in listed]
        ranks = [failure.plan.layout.num_devices for failure in failures]
        try:
            chosen = answer_uneven(
                profile,
                workload,
                with_less_elsewhere(goal, machine, [(goal.num_devices, known), *zip(ranks, shown, strict=True)]),
                machine=machine,
                make_problem=training_problem,
                calibration=calibration,
                shortfalls=[*known, *least, *(shortfall for each in shown for shortfall in each)],
            ).result.chosen
        except (NoFeasiblePlan, InvalidPlan):
            continue
        if chosen.plan not in tried:
            return chosen
    raise _no_other_plan(goal, machine, [*known, *least, *(shortfall for each in listed for shortfall in each)])


def _room_that_was_left(
    failure: Failure, profile: Profile, *, machine: Machine, workload: TrainingWorkload, goal: Goal
) -> Iterator[Shortfall]:
    """By kind of device that may have run out, the bytes that were left free there and one more: the least that the next plan
    leaves.
    """
    if not failure.plan.layout.ranks:
        return
    ranks = estimate_training(profile, plan=failure.plan, workload=workload, machine=machine).ranks
    rank = failed_rank(failure)
    for each in ranks if rank is None else (ranks[rank],):
        left_bytes = min(goal.device_budget_bytes, each.memory_bytes) - each.peak_high_bytes
        yield Shortfall(stage=EVERY_STAGE, tier="device", device=each.device, num_bytes=left_bytes + 1)


def _no_other_plan(goal: Goal, machine: Machine, shortfalls: Sequence[Shortfall]) -> NoFeasiblePlan:
    """In the words of the budget that would have been enough: what there is and what was missing."""
    most_bytes = max(min(goal.device_budget_bytes, kind.device.memory_bytes) for kind in machine.kinds)
    missing_bytes = shortfall_on("device", shortfalls)
    return NoFeasiblePlan(
        budget_bytes=most_bytes,
        smallest_feasible_bytes=most_bytes + missing_bytes,
        bytes_by_category={"shown_to_be_missing": missing_bytes},
    )
