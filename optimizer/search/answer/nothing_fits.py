"""The error that is raised where no plan fits: what the smallest is made of, and ways out."""

from collections.abc import Callable, Sequence

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
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
    short_of = list_short_of(problem, found)
    error = NoFeasiblePlan(
        budget_bytes=problem.goal.device_budget_bytes,
        smallest_feasible_bytes=smallest_bytes,
        bytes_by_category=found.device_bytes_by_category,
        hint="" if smallest_bytes <= problem.goal.device_budget_bytes and short_of else f"{', '.join(others)}, or {last}.",
        short_of=short_of,
    )
    error.fields["smallest_plan"] = plan.to_json()
    return error


def list_short_of(problem: Budgeted[PlanT, PredictionT, GoalT], found: PredictionT) -> list[str]:
    """Sentences on what the smallest plan lacks besides the device's budget."""
    memory = found.memory
    host_bytes = found.host_peak_bytes
    if memory is not None:
        host_bytes = max(host_bytes, memory.host_pinned.value + memory.host_pageable.value)
    asked = [
        ("host memory", host_bytes, problem.host_budget_bytes),
        ("the disk", found.disk_peak_bytes, problem.disk_budget_bytes),
        ("the remote store", found.remote_peak_bytes, problem.remote_budget_bytes),
    ]
    if memory is not None and memory.total_bytes:
        asked.append(("the card, with what a process holds beside tensors", memory.process.high, memory.total_bytes))
    over = [
        f"{name} has {format_bytes(has_bytes)}, at least {format_bytes(num_bytes)} is needed"
        for name, num_bytes, has_bytes in asked
        if num_bytes > has_bytes
    ]
    return [*over, *problem.stages_over(found)]
