"""The search itself, for any price function: solver, baselines, verification, frontier, explanation.

Everything here is pure and deterministic: the same problem gives the same result, and no clock is read.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from optimizer.plan.explain import explain_plan
from optimizer.search.baselines import BASELINES, price_baselines
from optimizer.search.frontier import frontier_of, price_spread
from optimizer.search.pricebook import PriceBook
from optimizer.search.problem import PricedPlan, SearchProblem
from optimizer.search.smallest import explain_infeasible
from optimizer.search.solve import solve
from optimizer.search.verify import VerificationFailed, verify_plan
from optimizer.serialize import to_json
from optimizer.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found. ``chosen`` always fits; a search that finds nothing raises instead."""

    chosen: PricedPlan
    baselines: dict[str, PricedPlan]
    """By label: keep_all, recompute_all, offload_all, every_second, accumulate_all."""
    frontier: tuple[PricedPlan, ...]
    """Plans the goal allows of which no other is both smaller and faster, from small to fast; some over the budget."""
    bound_step_ms: float
    """No allowed plan is faster, whatever the budget: keep everything, in the best setting."""
    explanation: tuple[str, ...]
    """The chosen plan in sentences."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def search(problem: SearchProblem) -> SearchResult:
    """The fastest plan that the goal allows and whose peak, upper end, honours the budgets.

    Raises NoFeasiblePlan with the smallest peak that was found and what it is made of.
    """
    remembering = replace(problem, price=cache(problem.price))
    book = PriceBook(remembering)
    baselines = price_baselines(remembering)
    for baseline in BASELINES.values():
        book.price(*baseline(remembering))
    solve(book)
    if book.best is None:
        raise explain_infeasible(remembering)
    bound_step_ms = price_spread(book)
    chosen = _first_verified(book, problem)
    return SearchResult(
        chosen=chosen,
        baselines=baselines,
        frontier=frontier_of(book),
        bound_step_ms=bound_step_ms,
        explanation=tuple(_explain(problem, chosen, baselines["keep_all"])),
    )


def _first_verified(book: PriceBook, problem: SearchProblem) -> PricedPlan:
    """The best plan that the replay confirms, priced without the book's memory.

    Raises VerificationFailed, a fault of ours, where it confirms none.
    """
    problems: tuple[str, ...] = ()
    for plan, prediction in book.feasible():
        problems = verify_plan(problem, plan=plan, prediction=prediction)
        if not problems:
            return problem.priced("chosen", plan, prediction)
    raise VerificationFailed(problems)


def _explain(problem: SearchProblem, chosen: PricedPlan, keep_all: PricedPlan) -> list[str]:
    sentences = explain_plan(chosen.plan, prediction=chosen.prediction, baseline=keep_all.prediction)
    room_bytes = problem.goal.device_budget_bytes - chosen.prediction.device_peak_high_bytes
    return [*sentences, f"{format_bytes(room_bytes)} of the budget stay free"]
