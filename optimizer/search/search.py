"""``search_plans`` and ``largest_micro_batch``: training's plans searched with the estimator's prices.

Torch-free; the estimator takes nearly all of the time.
"""

from collections.abc import Mapping
from typing import Any

from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.profile.profile import Profile
from optimizer.search.core import search
from optimizer.search.problem import PricedPlan
from optimizer.search.questions.largest_fit import find_largest_micro_batch
from optimizer.search.result import SearchResult
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload


def search_plans(
    profile: Profile,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The fastest plan that the goal allows and whose peak, upper end, honours the budgets.

    Raises NoFeasiblePlan with the smallest peak that was found and what it is made of.
    """
    return search(training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration))


def largest_micro_batch(
    profile: Profile,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> PricedPlan:
    """The fastest plan with the largest micro-batch for which some permitted plan fits.

    Its ``plan.batch.micro_batch_size`` is that micro-batch, a divisor of the workload's batch. Raises NoFeasiblePlan where none
    fits.
    """
    return find_largest_micro_batch(
        training_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    )
