"""Nothing fits: how small the job could be made, what it is then made of, and what else could be allowed."""

from dataclasses import replace
from functools import partial

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.answer.lightest import price_floor
from optimizer.search.answer.nothing_fits import nothing_fits
from optimizer.search.check.pin_errors import no_room_elsewhere
from optimizer.search.problem import SearchProblem
from optimizer.search.solver.exhaustive import price_all
from optimizer.search.solver.floors import has_floors
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.solve import solve

MAX_TIGHTENINGS = 4
"""Searches below the smallest peak found so far; each has found a smaller one where it is not the last."""
NEARLY = 1.05
"""Plans that allocate up to so much more than their tensors are taken for what they are by their tensors alone."""


def explain_infeasible(problem: SearchProblem) -> NoFeasiblePlan:
    """The error to raise. Its budget is enough: a search with exactly that much succeeds."""
    plan, prediction = find_smallest_allocated(problem)
    return nothing_fits(problem, plan, prediction, list_ways=partial(_list_ways, problem))


def find_smallest(problem: SearchProblem) -> tuple[Plan, Prediction]:
    """The permitted plan with the least upper end of the peak for which the other tiers have room: of small problems the least
    of all.

    First what must be near the smallest; where plans cannot be bounded, then searches with a byte less than was found, until
    one finds nothing.
    """
    return _smallest(_price_smallest(problem))


def find_smallest_allocated(problem: SearchProblem) -> tuple[Plan, Prediction]:
    """``find_smallest`` by what is allocated on a card: kernels hold far more beside the tensors of some plans than of others."""
    book = _price_smallest(problem)
    smallest = _smallest(book)
    if problem.detail is None or allocated_bytes(problem, *smallest) <= smallest[1].device_peak_high_bytes * NEARLY:
        return smallest
    by_choice: dict[str, tuple[Plan, Prediction]] = {}
    for pair in sorted(_roomy(book), key=lambda pair: pair[1].device_peak_high_bytes):
        by_choice.setdefault(pair[0].activations.per_block[0], pair)
    return min(by_choice.values(), key=lambda pair: allocated_bytes(problem, *pair))


def allocated_bytes(problem: SearchProblem, plan: Plan, prediction: Prediction) -> int:
    """The upper end of what a plan allocates, as a budget counts it."""
    found = problem.priced("smallest", plan, prediction).prediction
    return max(found.device_peak_high_bytes, 0 if found.memory is None else found.memory.allocated.high)


def _price_smallest(problem: SearchProblem) -> PriceBook:
    book = PriceBook(problem)
    if price_all(book, prune=False):
        return book
    price_floor(book)
    for _ in range(0 if has_floors(problem) else MAX_TIGHTENINGS):
        below = PriceBook(problem.with_budget(_smallest(book)[1].device_peak_high_bytes - 1))
        solve(below)
        if below.best is None:
            break
        book = below
    return book


def smallest_found(book: PriceBook) -> int:
    """Price plans until one fits, or all that may be smallest are priced; the least upper end of the peak found."""
    if not price_all(book, prune=False):
        price_floor(book)
        if book.best is None:
            solve(book)
    return _smallest(book)[1].device_peak_high_bytes


def _smallest(book: PriceBook) -> tuple[Plan, Prediction]:
    return min(_roomy(book), key=lambda pair: pair[1].device_peak_high_bytes)


def _roomy(book: PriceBook) -> list[tuple[Plan, Prediction]]:
    """Permitted plans for which the other tiers have room. Raises InvalidPlan where there are none."""
    roomy = [pair for pair in book.permitted() if book.problem.fits_elsewhere(pair[1])]
    if not roomy:
        raise no_room_elsewhere(book.problem)
    return roomy


def _list_ways(problem: SearchProblem, smallest_bytes: int) -> list[str]:
    """Ways out, the ones that cost least to the user first. What is said to help has been priced."""
    ways = [f"Raise the budget to {format_bytes(smallest_bytes)}", "shorten the sequence"]
    if not problem.names_ways:
        return ways
    ways.extend(_permissions(problem, smallest_bytes))
    unlimited = replace(problem, host_budget_bytes=2**62)
    ways.extend(_way("give it more host memory", unlimited, smallest_bytes))
    if not problem.goal.allow_lossy or problem.goal.most_loss != "any":
        relaxed = replace(problem, goal=replace(problem.goal, allow_lossy=True, most_loss="any"))
        examples = "packed copies and frozen weights" if problem.goal.allow_lossy else "bf16 and 8-bit optimizer state"
        ways.extend(_way(f"allow lossy choices such as {examples}", relaxed, smallest_bytes))
    return ways


def _permissions(problem: SearchProblem, smallest_bytes: int) -> list[str]:
    """Each forbidden technique that helps by itself; where none does, all that are forbidden together."""
    forbidden = [
        technique
        for technique in problem.goal.forbid
        if technique not in problem.unavailable and problem.goal.allows_loss_by(technique)
    ]
    ways: list[str] = []
    for technique in forbidden:
        others = tuple(other for other in problem.goal.forbid if other != technique)
        relaxed = replace(problem, goal=replace(problem.goal, forbid=others))
        ways.extend(_way(f"permit '{TECHNIQUE_LABELS[technique]}'", relaxed, smallest_bytes))
    if forbidden and not ways:
        relaxed = replace(problem, goal=replace(problem.goal, forbid=()))
        ways.extend(_way("permit what is forbidden", relaxed, smallest_bytes))
    return ways


def _way(text: str, relaxed: SearchProblem, smallest_bytes: int) -> list[str]:
    """Empty where it would not help."""
    relaxed_bytes = _smallest(price_floor(PriceBook(relaxed)))[1].device_peak_high_bytes
    if relaxed_bytes >= smallest_bytes or format_bytes(relaxed_bytes) == format_bytes(smallest_bytes):
        return []
    return [f"{text} (smallest peak then {format_bytes(relaxed_bytes)})"]
