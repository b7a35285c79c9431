"""The search itself, for any price function: solver, baselines, verification, frontier, explanation.

Everything here is pure and deterministic: the same problem gives the same result, and no clock is read.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.estimate.prediction import Prediction
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.explain.training import explain_plan
from optimizer.plan.plan import Plan
from optimizer.search.answer.baselines import list_baselines, price_baselines
from optimizer.search.answer.fitting import find_fitting
from optimizer.search.answer.frontier import frontier_of, price_spread
from optimizer.search.answer.lever_value import LeftOut, list_left_out, price_without
from optimizer.search.answer.lightest import price_floor
from optimizer.search.answer.smallest import explain_infeasible, find_smallest_allocated
from optimizer.search.check.beside import Beside
from optimizer.search.check.card_fit import ACCEPTED, CardFit, Outpaced, find_room
from optimizer.search.check.pins import check_pins
from optimizer.search.check.verify import VerificationFailed, verify_plan
from optimizer.search.cut_model import find_cut_plan, search_cut
from optimizer.search.problem import OuterPlan, PricedPlan, SearchProblem
from optimizer.search.result import SearchResult
from optimizer.search.solver.bounds import bound_of
from optimizer.search.solver.floors import is_over_floor
from optimizer.search.solver.polish import polish
from optimizer.search.solver.pricebook import PriceBook, remembering
from optimizer.search.solver.solve import solve

_NUM_LIKELY = 3
"""Settings that were best under a larger budget and are looked at first under a smaller one."""
_MAX_LEARNT = 3
"""Searches that count what kernels were seen to hold beside tensors, each of them knowing more."""


def search(problem: SearchProblem, *, known: Sequence[Plan] = (), most_ms: float = math.inf) -> SearchResult:
    """The fastest plan that the goal allows and whose peak, upper end, honours the budgets.

    known: plans that the answer must not be slower than, where they are allowed and fit. Raises NoFeasiblePlan with the smallest
    peak that was found and what it is made of, InvalidPlan where nothing can keep the goal's pins, Outpaced once it is clear that
    no plan with room on the card takes ``most_ms`` a step or less.
    """
    if problem.layout.is_cut:
        return search_cut(problem, most_ms=most_ms)
    book = _solved(problem, known)
    problem = book.problem
    baselines = price_baselines(problem)
    bound_step_ms = _bound_of(book)
    unlimited_step_ms = price_spread(book)
    chosen, book = first_on_the_card(book, most_ms=most_ms)
    left_out = list_left_out(problem, chosen.plan, chosen.prediction)
    return SearchResult(
        chosen=chosen,
        baselines=baselines,
        frontier=frontier_of(book, device_budget_bytes=problem.goal.device_budget_bytes),
        bound_step_ms=bound_step_ms,
        unlimited_step_ms=unlimited_step_ms,
        explanation=tuple(explain_choice(problem, chosen, baselines["keep_all"], left_out)),
        left_out=left_out,
    )


def find_chosen(problem: SearchProblem, *, most_ms: float = math.inf) -> PricedPlan:
    """The plan that ``search`` would choose, and nothing beside it. Raises as ``search`` does; slower plans than ``most_ms`` are
    not looked for.
    """
    if problem.layout.is_cut:
        return find_cut_plan(problem, most_ms=most_ms)
    return first_on_the_card(_solved(problem, (), most_ms=most_ms), most_ms=most_ms)[0]


def _solved(problem: SearchProblem, known: Sequence[Plan], *, most_ms: float = math.inf) -> PriceBook:
    """The book with the best plan in it. Raises Outpaced where all that fit are slower than ``most_ms``, or may be."""
    check_pins(problem)
    book = PriceBook(remembering(problem), most_ms=most_ms)
    for baseline in list_baselines(book.problem).values():
        book.price(*baseline(book.problem))
    for plan in known:
        book.price(OuterPlan.of(plan), plan.activations.per_block)
    if book.problem.lacks_disk or is_over_floor(book.problem):
        raise explain_infeasible(book.problem)
    if not find_best(book):
        raise Outpaced(None, least=most_ms) if book.has_limit else explain_infeasible(book.problem)
    return book


def _bound_of(book: PriceBook) -> float:
    if book.is_complete:
        return book.best_step_ms
    return bound_of(book) if book.floor_ms is None else book.floor_ms


def search_budgets(problem: SearchProblem, budgets_bytes: Sequence[int]) -> dict[int, SearchResult]:
    """The answer at each device budget for which there is one, smallest first, never slower than that of a smaller one.

    Each search knows the plans found for less memory. One by one, searches of deep models promise that of themselves only as
    closely as their gaps say.
    """
    remembered = remembering(problem)
    results: dict[int, SearchResult] = {}
    for budget_bytes in sorted(set(budgets_bytes)):
        known = [result.chosen.plan for result in results.values()][-1:]
        with suppress(NoFeasiblePlan):
            results[budget_bytes] = search(remembered.with_budget(budget_bytes), known=known)
    return results


def find_best(book: PriceBook, *, likely: Sequence[Plan] = (), polishes: bool = True) -> bool:
    """Report whether some permitted plan fits; the best found is ``book.best``. likely, polishes: as ``solve`` has them."""
    solve(book, likely=likely, polishes=polishes)
    if book.best is None and not book.is_complete and not book.has_limit:
        # The solver passes over what looks hopeless; before it is said that nothing fits, the smallest plans are priced.
        polish(price_floor(book))
    return book.best is not None


def first_on_the_card(book: PriceBook, *, most_ms: float = math.inf) -> tuple[PricedPlan, PriceBook]:
    """The best plan whose whole process has room on the card (``check/card_fit.py``), and the book it is from.

    Raises NoFeasiblePlan where nothing is left then, Outpaced as ``search`` does.
    """
    problem, beside = book.problem, Beside()

    def found(book: PriceBook, *, grows: bool) -> CardFit[PricedPlan, PriceBook]:
        chosen = _first_verified(book, grows=grows)
        return CardFit(chosen=replace(chosen, verdict=problem.verdict(chosen.prediction)), source=book)

    grows = False
    first = found(book, grows=grows)
    memory = first.chosen.prediction.memory
    if first.chosen.verdict not in ACCEPTED and memory is not None and memory.total_bytes:
        # segments that grow leave fewer gaps; where they are needed once they are kept to
        grows = True
        first = found(book, grows=grows)

    books = [book]

    def within(budget_bytes: int) -> CardFit[PricedPlan, PriceBook] | None:
        other = PriceBook(beside.added_to(problem).with_budget(budget_bytes))
        if not find_best(other, likely=list_likely(books, budget_bytes=budget_bytes)):
            return None
        books.append(other)
        return found(other, grows=grows)

    for _ in range(_MAX_LEARNT):
        if first.chosen.verdict in ACCEPTED or not beside.learn(problem, first.chosen):
            break
        lighter = within(problem.goal.device_budget_bytes)
        if lighter is None:
            break
        first = lighter
    best = find_room(
        first,
        budget_bytes=problem.goal.device_budget_bytes,
        within=within,
        cost=lambda chosen: chosen.prediction.step_ms,
        most_cost=most_ms,
    )
    if best is not None:
        return best.chosen, best.source
    light = find_fitting(problem)
    if light is not None:
        return replace(light, label="chosen"), book
    smallest = _priced(problem, *find_smallest_allocated(problem), grows=grows)
    if smallest.verdict in ACCEPTED:
        return smallest, book
    raise explain_infeasible(problem)


def list_likely(books: Sequence[PriceBook], *, budget_bytes: int) -> list[Plan]:
    """Plans near which the best under another budget may be: the best of each book with a peak of so many bytes, and the best of
    some settings of the last book, whatever their peaks.
    """
    lighter = [plan for book in books if (plan := book.find_lighter(budget_bytes)) is not None]
    return [*lighter, *books[-1].list_best(_NUM_LIKELY)]


def _first_verified(book: PriceBook, *, grows: bool) -> PricedPlan:
    """The best plan that the replay confirms, priced without the book's memory.

    Raises VerificationFailed, a fault of ours, where it confirms none.
    """
    problems: tuple[str, ...] = ()
    for plan, prediction in book.feasible():
        problems = verify_plan(book.problem, plan=plan, prediction=prediction)
        if not problems:
            return _priced(book.problem, plan, prediction, grows=grows)
    raise VerificationFailed(problems)


def _priced(problem: SearchProblem, plan: Plan, prediction: Prediction, *, grows: bool) -> PricedPlan:
    """grows: with segments that grow, where they may; on the device's tensors that has no effect."""
    growing = replace(plan, allocator=AllocatorPlan(expandable_segments=True))
    return problem.priced("chosen", growing if grows and problem.permits(growing) else plan, prediction)


def explain_choice(
    problem: SearchProblem, chosen: PricedPlan, keep_all: PricedPlan, left_out: Iterable[LeftOut]
) -> list[str]:
    sentences = explain_plan(
        chosen.plan,
        prediction=chosen.prediction,
        baseline=keep_all.prediction,
        without=price_without(problem, chosen.plan),
    )
    room_bytes = problem.goal.device_budget_bytes - chosen.prediction.device_peak_high_bytes
    return [*sentences, *(found.sentence for found in left_out), f"{format_bytes(room_bytes)} of the budget stay free"]
