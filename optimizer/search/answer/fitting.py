"""A plan that fits, found with few prices, for questions that only need one.

Bounds come first: what they rule out costs no price. Of the rest only plans are priced whose blocks all do the same, those
with the least bound on their time first. So the plan need not be the fastest; a search there finds that.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from optimizer.base.errors import InvalidPlan
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.plan import Plan
from optimizer.profile.extent import traced_choice
from optimizer.search.answer.lightest import price_floor
from optimizer.search.arrangements import PerBlock
from optimizer.search.check.card_fit import ACCEPTED
from optimizer.search.problem import OuterPlan, PricedPlan, Relax, SearchProblem
from optimizer.search.solver.floors import has_floors, is_over_floor, list_floors, share_with_room
from optimizer.search.solver.grid import all_homes, has_free_fraction, with_chunks
from optimizer.search.solver.levers import largest_fraction
from optimizer.search.solver.nodes import narrow, with_share
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.relaxed import bound_relaxed, least_high_bytes

MAX_BATCHES = 3
MAX_PRICED, MAX_DETAILED = 80, 3
"""Plans that are priced, and plans of which all that a process takes is worked out, which is slow."""


class _Candidate(NamedTuple):
    """Plans of one setting whose blocks all do the same, bounded."""

    bound_ms: float
    num_bytes: float
    setting: OuterPlan
    per_block: PerBlock


def may_fit(problem: SearchProblem) -> bool:
    """False where it is known without a price that nothing fits, or that nothing is left to choose from."""
    return bool(problem.settings()) and not is_over_floor(problem)


Beside = dict[tuple[object, ...], float]
"""By the numbers' form, the length of sequences and what blocks do, bytes that each sequence of a micro-batch takes beside its
tensors, as far as plans that did not fit have shown (``_bytes_beside``); for several questions about one model."""


def find_fitting(problem: SearchProblem, *, beside: Beside | None = None) -> PricedPlan | None:
    """A plan that fits with all that a process takes of a card beside its tensors; None where none was found."""
    if not may_fit(problem):
        return None
    if has_floors(problem) and problem.relax is not None:
        candidates = sorted(_candidates(problem, problem.relax), key=lambda each: each.bound_ms)
        if candidates:
            return _first_that_fits(problem, candidates, {} if beside is None else beside) or _lightest_of(problem, candidates)
    return _lightest_that_fits(problem)


def _candidates(problem: SearchProblem, relax: Relax) -> Iterator[_Candidate]:
    """With the representation that holds least, in the largest micro-batches that may fit, and the smallest."""
    lightest = list_floors(problem)[0].setting
    bases = [base for base in problem.settings() if _representation(base) == _representation(lightest)]
    hopeful = [base for base in bases if _may_hold(problem, base, relax)]
    for base in dict.fromkeys([*reversed(hopeful[-MAX_BATCHES:]), *hopeful[:1]]):
        for home in all_homes(problem, base):
            yield from _candidates_at(problem, home, relax)


def _representation(setting: OuterPlan) -> tuple[object, ...]:
    return setting.dtype, setting.master, setting.autocast, setting.frozen, setting.bits


def _may_hold(problem: SearchProblem, base: OuterPlan, relax: Relax) -> bool:
    return any(True for home in reversed(all_homes(problem, base)) for _ in _candidates_at(problem, home, relax))


def _candidates_at(problem: SearchProblem, home: OuterPlan, relax: Relax) -> Iterator[_Candidate]:
    chunked, budget_bytes = with_chunks(problem, home), problem.goal.device_budget_bytes
    counts, is_free = tuple(setting.num_chunks for setting in chunked), has_free_fraction(problem, home)
    found = relax.setting(home, forms=problem.forms, chunk_counts=counts, state_is_free=is_free)
    share = min(
        share_with_room(found.host_bytes, problem.host_budget_bytes),
        share_with_room(found.disk_bytes, problem.disk_budget_bytes),
        share_with_room(found.remote_bytes, problem.remote_budget_bytes),
    )
    if (share < 1.0 and not is_free) or least_high_bytes(found, share=share).min() > budget_bytes:
        return
    for form, (choice, compress) in enumerate(problem.forms):
        if compress != "none":
            continue
        for chunks, setting in enumerate(chunked):
            narrowed = with_share(narrow(found, [form], chunks), share)
            num_bytes = float(least_high_bytes(narrowed)[0])
            if num_bytes <= budget_bytes:
                bound_ms = float(bound_relaxed(narrowed, budget_bytes=budget_bytes)[0])
                yield _Candidate(bound_ms, num_bytes, setting, (choice,) * problem.num_blocks)


def _first_that_fits(problem: SearchProblem, candidates: list[_Candidate], beside: Beside) -> PricedPlan | None:
    book, num_detailed, budget_bytes = PriceBook(problem), 0, problem.goal.device_budget_bytes
    for candidate in candidates:
        alike = _alike(problem, candidate)
        beside_bytes = beside.get(alike, 0.0) * candidate.setting.micro_batch_size
        if book.num_prices >= MAX_PRICED or num_detailed >= MAX_DETAILED:
            break
        if candidate.num_bytes + beside_bytes > budget_bytes:
            continue
        setting = largest_fraction(book, candidate.setting)
        if setting is None:
            continue
        prediction, plan = book.price(setting, candidate.per_block), _growing(problem, setting.plan(candidate.per_block))
        is_small = prediction.device_peak_high_bytes + beside_bytes <= budget_bytes
        if is_small and problem.fits_elsewhere(prediction) and problem.permits(plan):
            found, num_detailed = problem.priced("way out", plan, prediction), num_detailed + 1
            if found.verdict in ACCEPTED:
                return found
            beside[alike] = _bytes_beside(problem, found) / candidate.setting.micro_batch_size
    return None


def _alike(problem: SearchProblem, candidate: _Candidate) -> tuple[object, ...]:
    setting, length = candidate.setting, problem.workload.sequence_length
    return setting.dtype, setting.autocast, setting.frozen, length, traced_choice(candidate.per_block[0])


def _lightest_of(problem: SearchProblem, candidates: list[_Candidate]) -> PricedPlan | None:
    """The plan that holds least beside its tensors: blocks that are rebuilt, where they may be, in the smallest micro-batch."""
    book = PriceBook(problem)
    rebuilt = [each for each in candidates if each.per_block[0] == "recompute"] or candidates
    for candidate in sorted(rebuilt, key=lambda each: (each.setting.micro_batch_size, each.num_bytes, each.bound_ms))[:1]:
        setting = largest_fraction(book, candidate.setting)
        if setting is None:
            continue
        plan = _growing(problem, setting.plan(candidate.per_block))
        found = problem.priced("way out", plan, book.price(setting, candidate.per_block))
        if found.verdict in ACCEPTED and problem.permits(plan):
            return found
    return None


def _growing(problem: SearchProblem, plan: Plan) -> Plan:
    """With segments that grow, where they may, which leave fewer gaps between tensors."""
    growing = replace(plan, allocator=AllocatorPlan(expandable_segments=True))
    return growing if problem.permits(growing) else plan


def _bytes_beside(problem: SearchProblem, found: PricedPlan) -> int:
    """Room that a plan's tensors must leave in the budget for what the process holds beside them."""
    memory, tensor_bytes = found.prediction.memory, found.prediction.device_peak_high_bytes
    if memory is None:
        return 0
    outside_bytes = max(0, memory.total_bytes - problem.goal.device_budget_bytes)
    process_bytes = memory.process.high - outside_bytes if memory.total_bytes else 0
    return max(memory.allocated.high, process_bytes) - tensor_bytes


def _lightest_that_fits(problem: SearchProblem) -> PricedPlan | None:
    """The fastest of the lightest plans, or else the one with the smallest peak."""
    try:
        feasible = price_floor(PriceBook(problem)).feasible()
    except InvalidPlan:
        return None
    if not feasible:
        return None
    smallest = min(feasible, key=lambda pair: pair[1].device_peak_high_bytes)
    for plan, prediction in (feasible[0], smallest):
        priced = problem.priced("way out", _growing(problem, plan), prediction)
        if priced.verdict in ACCEPTED:
            return priced
    return None
