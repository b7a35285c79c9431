"""``search_plans``: binds the search to the estimator. Torch-free; the estimator takes nearly all of its time."""

from collections.abc import Mapping
from typing import Any

from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.core import SearchResult, search
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.workload import Goal, TrainingWorkload


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


def training_problem(
    profile: Profile,
    *,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    calibration: Mapping[str, Any] | None = None,
) -> SearchProblem:
    """The problem with the estimator bound as its price; for callers that want the baselines alone."""

    def price(plan: Plan) -> Prediction:
        return estimate_training(profile, plan=plan, workload=workload, machine=machine, calibration=calibration)

    host_budget_bytes = machine.host_memory_bytes if goal.host_budget_bytes is None else goal.host_budget_bytes
    return SearchProblem(
        num_blocks=profile.num_blocks,
        workload=workload,
        goal=goal,
        host_budget_bytes=host_budget_bytes,
        price=price,
        can_bf16="bf16" in machine.rates.matmul_flops_per_s,
        can_8bit="adamw_8" in machine.rates.optimizer_elements_per_s,
    )


__all__ = ["PricedPlan", "SearchResult", "search_plans", "training_problem"]
