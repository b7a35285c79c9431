"""The error that is raised where no plan fits: what the smallest is made of, and ways out."""

from collections.abc import Callable, Sequence

from optimizer.base.errors import NoFeasiblePlan
from optimizer.search.budgeted import Budgeted, GoalT, PlanT, PredictionT


def nothing_fits(
    problem: Budgeted[PlanT, PredictionT, GoalT],
    plan: PlanT,
    prediction: PredictionT,
    *,
    list_ways: Callable[[int], Sequence[str]],
) -> NoFeasiblePlan:
    """The error to raise. Its budget is enough: a search with exactly that much succeeds.

    plan: the smallest. list_ways: of so many bytes, what else could be asked for, in words.
    """
    found = problem.priced("smallest", plan, prediction).prediction
    allocated_bytes = 0 if found.memory is None else found.memory.allocated.high
    smallest_bytes = max(found.device_peak_high_bytes, allocated_bytes)
    *others, last = list_ways(smallest_bytes)
    error = NoFeasiblePlan(
        budget_bytes=problem.goal.device_budget_bytes,
        smallest_feasible_bytes=smallest_bytes,
        bytes_by_category=found.device_bytes_by_category,
        hint=f"{', '.join(others)}, or {last}.",
    )
    error.fields["smallest_plan"] = plan.to_json()
    return error
