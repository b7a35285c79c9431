"""Nothing fits: how small the job could be made, what it is then made of, and what else could be allowed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.units import format_bytes
from optimizer.estimate.prediction import Prediction
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.search.answer.nothing_fits import nothing_fits
from optimizer.search.check.pin_errors import no_room_elsewhere
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.exhaustive import price_all
from optimizer.search.solver.grid import with_chunks, with_prefetch
from optimizer.search.solver.levers import homes_of, largest_fraction
from optimizer.search.solver.lines import lightest_bytes
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.solve import price_lightest, solve

MAX_TIGHTENINGS = 4
"""Searches below the smallest peak found so far; each has found a smaller one where it is not the last."""
NUM_LIGHTEST = 3
"""Settings, lightest first, whose mixtures are priced as well."""


def explain_infeasible(problem: SearchProblem) -> NoFeasiblePlan:
    """The error to raise. Its budget is enough: a search with exactly that much succeeds."""
    plan, prediction = find_smallest(problem)
    return nothing_fits(problem, plan, prediction, list_ways=partial(_list_ways, problem))


def find_smallest(problem: SearchProblem) -> tuple[Plan, Prediction]:
    """The permitted plan with the least upper end of the peak for which the other tiers have room: of small problems the least
    of all.

    First what must be near the smallest, then searches with a byte less than was found, until one finds nothing.
    """
    book = PriceBook(problem)
    if price_all(book, prune=False):
        return _smallest(book)
    smallest = _smallest(price_floor(book))
    for _ in range(MAX_TIGHTENINGS):
        below = PriceBook(problem.with_budget(smallest[1].device_peak_high_bytes - 1))
        solve(below)
        if below.best is None:
            break
        smallest = _smallest(below)
    return smallest


def smallest_found(book: PriceBook) -> int:
    """Price plans until one fits, or all that may be smallest are priced; the least upper end of the peak found."""
    if not price_all(book, prune=False):
        price_floor(book)
        if book.best is None:
            solve(book)
    return _smallest(book)[1].device_peak_high_bytes


def _smallest(book: PriceBook) -> tuple[Plan, Prediction]:
    roomy = [pair for pair in book.permitted() if book.problem.fits_elsewhere(pair[1])]
    if not roomy:
        raise no_room_elsewhere(book.problem)
    return min(roomy, key=lambda pair: pair[1].device_peak_high_bytes)


def price_floor(book: PriceBook) -> PriceBook:
    """Only what can be smallest: one sequence at a time, and the whole batch, which sums no gradients."""
    problem = book.problem
    sizes = [setting.micro_batch_size for setting in problem.settings()]
    candidates: dict[OuterPlan, int] = {}
    for base in problem.settings():
        if base.micro_batch_size == min(sizes) or base.accumulation_steps == 1:
            book.keep_all_ms(base)
            candidates.update({setting: lightest_bytes(book, setting) for setting in _light_settings(book, base)})
    for setting in sorted(candidates, key=lambda setting: (candidates[setting], repr(setting)))[:NUM_LIGHTEST]:
        price_lightest(book, setting)
    return book


def _light_settings(book: PriceBook, base: OuterPlan) -> Iterator[OuterPlan]:
    """Every count of chunks at the strongest home; every home at the best of them."""
    homes = [home for home in (largest_fraction(book, home) for home in homes_of(book, base)) if home is not None]
    if not homes:
        return
    problem = book.problem
    strongest = [fetching for chunked in with_chunks(problem, homes[-1]) for fetching in with_prefetch(problem, chunked)]
    yield from strongest
    best = min(strongest, key=lambda setting: lightest_bytes(book, setting))
    for home in homes[:-1]:
        yield replace(home, num_chunks=best.num_chunks, prefetch=best.prefetch)


def _list_ways(problem: SearchProblem, smallest_bytes: int) -> list[str]:
    """Ways out, the ones that cost least to the user first. What is said to help has been priced."""
    ways = [f"Raise the budget to {format_bytes(smallest_bytes)}", "shorten the sequence"]
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
