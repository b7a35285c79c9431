"""The same as ``replan.py`` where the machine's devices are of several kinds: each kind that ran out leaves more of itself free.

A shortfall is taken off all stages of the kind at once, since the devices' shares of the work are found by many small searches.
Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optimizer.api.keep_form import keep_form
from optimizer.api.replan import LIKELY_SHARES, Failure, failed_rank, list_shortfalls
from optimizer.base.errors import InvalidPlan, NoFeasiblePlan
from optimizer.estimate.job.shortfalls import Shortfall, shortfall_on, toward_likely
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.share import count_sharing
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.budgeted import budgets_elsewhere
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.uneven.answer import answer_uneven
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
) -> PricedPlan:
    """The fastest plan on any of the machine's devices that was not tried, with room for what the failed attempts have shown.

    checkpoint_of: as ``replan_profiled`` has it. Raises NoFeasiblePlan.
    """
    if checkpoint_of is not None:
        goal = keep_form(goal, checkpoint_of, has_adapter=workload.adapter is not None)
    tried = [failure.plan for failure in failures]
    here: dict[str, Any] = {"machine": machine, "workload": workload, "goal": goal}
    listed = list_shortfalls(failures, profile, **here)
    least = [
        _ranks_that_ran_out(failure, profile, **here) if any(each.tier == "device" for each in shown) else {}
        for failure, shown in zip(failures, listed, strict=True)
    ]
    for share in LIKELY_SHARES:
        shown = [toward_likely(each, share) for each in listed]
        try:
            chosen = answer_uneven(
                profile,
                workload,
                _with_less_of_the_host(goal, machine, _spared_of_the_host(failures, shown, machine)),
                machine=machine,
                make_problem=training_problem,
                calibration=calibration,
                spared_bytes=_spared(least, shown),
            ).result.chosen
        except (NoFeasiblePlan, InvalidPlan):
            continue
        if chosen.plan not in tried:
            return chosen
    raise _no_other_plan(goal, machine, _spared(least, listed))


def _ranks_that_ran_out(
    failure: Failure, profile: Profile, *, machine: Machine, workload: TrainingWorkload, goal: Goal
) -> dict[str, int]:
    """By kind of device that may have run out, the bytes that were left free there and one more: what the next plan leaves."""
    if not failure.plan.layout.ranks:
        return {}
    ranks = estimate_training(profile, plan=failure.plan, workload=workload, machine=machine).ranks
    rank = failed_rank(failure)
    found: dict[str, int] = {}
    for each in ranks if rank is None else (ranks[rank],):
        left_bytes = min(goal.device_budget_bytes, each.memory_bytes) - each.peak_high_bytes
        found[each.device] = max(found.get(each.device, 0), left_bytes + 1)
    return found


def _spared(least: Sequence[Mapping[str, int]], shown: Sequence[Sequence[Shortfall]]) -> dict[str, int]:
    """By kind of device, the bytes that its ranks leave free."""
    spared: dict[str, int] = {}
    for by_kind, found in zip(least, shown, strict=True):
        for name, num_bytes in by_kind.items():
            spared[name] = max(spared.get(name, 0), num_bytes, shortfall_on("device", found))
    return spared


def _spared_of_the_host(
    failures: Sequence[Failure], shown: Sequence[Sequence[Shortfall]], machine: Machine
) -> int:
    """Bytes that all ranks of a host leave free together: each as many as one has shown."""
    return max(
        (
            count_sharing(machine, num_ranks=failure.plan.layout.num_devices) * shortfall_on("host", found)
            for failure, found in zip(failures, shown, strict=True)
        ),
        default=0,
    )


def _with_less_of_the_host(goal: Goal, machine: Machine, num_bytes: int) -> Goal:
    if not num_bytes:
        return goal
    elsewhere = budgets_elsewhere(machine, host_bytes=goal.host_budget_bytes, disk_bytes=goal.disk_budget_bytes)
    return replace(goal, host_budget_bytes=max(0, elsewhere["host_budget_bytes"] - num_bytes))


def _no_other_plan(goal: Goal, machine: Machine, spared: Mapping[str, int]) -> NoFeasiblePlan:
    """In the words of the budget that would have been enough: what there is and what was missing."""
    most_bytes = max(min(goal.device_budget_bytes, kind.device.memory_bytes) for kind in machine.kinds)
    missing_bytes = max(spared.values(), default=0)
    return NoFeasiblePlan(
        budget_bytes=most_bytes,
        smallest_feasible_bytes=most_bytes + missing_bytes,
        bytes_by_category={"shown_to_be_missing": missing_bytes},
    )
