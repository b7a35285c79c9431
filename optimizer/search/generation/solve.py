"""Prices plans in the order of the least that each can take, until no other can be better. Pure and deterministic.

What is relied on, each held to the estimator by a test:

- no plan takes less time, or less of any tier, than its floor (``estimate/bounds/generation_floor.py``), which costs
next to nothing;
- where prompts are of one length and ask for as many tokens, a pass of more sequences takes no less memory on any tier. So of
  plans that differ in their batch alone none larger than one that does not fit is priced; where they differ all are.

Nothing else is passed over, so what is found is what pricing all plans would find; but where keys and values are made again, the
number of tokens whose floor is least is priced alone, and what others could win the bound says. Where very many plans are nearly
as good as the best, the search ends after ``PATIENCE`` prices with one that is within ``SETTLED`` of it, and says so
(``Solution.bound``).

Batch sizes are all from one to the number of sequences; beyond ``MAX_EVERY`` sequences only those that split them evenly into
some number of passes. Of those in between, which need as many passes, the bound says how much better they could be.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.plan.generation import GenerationPlan
from optimizer.search.generation.candidates import MAX_EVERY, Candidates, list_batches
from optimizer.search.generation.problem import GenerationProblem

PATIENCE: Final = 48
"""Plans that are priced whatever they could win."""
SETTLED: Final = 0.01
"""Share of the best that further plans could win."""
ROUGH: Final = 1e-3
"""Prices in a search are to within less."""
_Value = tuple[float, ...]
"""The quantities to minimize; later entries decide between equals."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best plan that fits."""

    plan: GenerationPlan
    bound: float
    """No permitted plan that fits has less of what the goal is about (``value_of``)."""


@dataclass
class Book:
    """All priced plans, and the best of them that fits."""

    problem: GenerationProblem
    """Its price is remembered."""
    predictions: dict[GenerationPlan, GenerationPrediction] = field(default_factory=dict)
    best: tuple[_Value, GenerationPlan] | None = None

    def price(self, plan: GenerationPlan) -> GenerationPrediction:
        """Whatever it is."""
        known = self.predictions.get(plan)
        if known is None:
            known = self.predictions[plan] = self.problem.price(plan)
        return known

    def offer(self, plan: GenerationPlan) -> bool:
        """Price the plan and keep it where it is the best so far; report whether it fits."""
        prediction = self.price(plan)
        if not self.problem.fits(prediction):
            return False
        value = value_of(self.problem, plan, prediction)
        if self.best is None or value < self.best[0]:
            self.best = value, plan
        return True


def value_of(problem: GenerationProblem, plan: GenerationPlan, prediction: GenerationPrediction) -> _Value:
    """Smaller is better; equals are decided by the time of all, the peak, and what is simpler."""
    rest = (
        prediction.total_s,
        prediction.device_peak_high_bytes,
        prediction.host_peak_bytes,
        plan.weights.prefetch,
        plan.num_micro_batches,
    )
    if problem.goal.objective == "first_token":
        return prediction.prefill_ms, *rest
    if problem.goal.objective == "largest_batch":
        return -plan.batch_size, *rest
    return rest


def solve(book: Book, *, patience: int = PATIENCE) -> Solution | None:
    """None where nothing fits."""
    candidates = Candidates(book.problem)
    left = None
    if book.problem.goal.objective == "largest_batch":
        _offer_largest(book, candidates)
    else:
        left = _offer(book, candidates, patience)
    if book.best is None:
        return None
    return Solution(plan=book.best[1], bound=_bound(book, book.best[0][0], left, candidates))


def spread_evenly(book: Book, best: GenerationPlan, *, at_most_s: float = inf) -> GenerationPlan:
    """The plan with its sequences spread evenly over as many micro-batches, where that is as good as settled: it takes less
    memory, and rates are measured at few sizes, between which a small last micro-batch looks cheaper than it is.

    at_most_s: what others take, which it must not exceed. Only the time of all is looked at; for other goals the best stays.
    """
    problem = book.problem
    if problem.goal.objective != "throughput" or problem.goal.pins.batch_size is not None or not problem.workload.is_even:
        return best
    num_sequences = problem.workload.num_sequences
    spread = replace(best, batch_size=-(-num_sequences // -(-num_sequences // best.batch_size)))
    before, after = book.price(best), book.price(spread)
    is_settled = after.total_s <= min(before.total_s * (1 + SETTLED), at_most_s)
    return spread if is_settled and problem.fits(after) else best


def _offer(book: Book, candidates: Candidates, patience: int) -> float | None:
    """The least that any plan left out could take; None where all were looked at."""
    too_large: dict[Hashable, int] = {}
    """By family, the smallest batch that does not fit."""
    num_priced = 0
    others = inf
    """The least that plans could take of which another number of tokens made again was priced."""
    for candidate in candidates:
        slack = ROUGH if num_priced < patience else -SETTLED
        if book.best is not None and candidate.key[0] * (1 - slack) >= book.best[0][0]:
            return min(candidate.key[0], others)
        size = candidate.plan.batch_size
        if size < too_large.get(candidate.family, size + 1):
            num_priced += 1
            if candidate.plan.kv_cache.prefix_tokens:
                others = min(others, candidate.key[0])
            if not book.offer(candidate.plan) and book.problem.workload.is_even:
                too_large[candidate.family] = size
    return None if others == inf else others


def _offer_largest(book: Book, candidates: Candidates) -> None:
    """In each family the largest batch that fits, where one as large as the best may fit, and not slower."""
    seen: set[Hashable] = set()
    for candidate in candidates:
        largest, least_s = -int(candidate.key[0]), candidate.key[1] * (1 - ROUGH)
        at_least = 1
        if book.best is not None:
            at_least = book.best[1].batch_size
            if (-largest, least_s) >= book.best[0][:2]:
                return
        if candidate.family not in seen:
            seen.add(candidate.family)
            size = find_largest_batch(book, candidate.plan, at_least=at_least, at_most=largest)
            if size:
                book.offer(replace(candidate.plan, batch_size=size))


def _bound(book: Book, best: float, left: float | None, candidates: Candidates) -> float:
    """The best's own value where nothing else can be better; else the least that is left, and what other batches could win.

    That is said of micro-batches whose time is convex in their size, as rooflines are: of so many, equal ones are the fastest.
    """
    bound = best
    if left is not None and left - ROUGH * abs(left) < best:
        bound = min(bound, left - ROUGH * abs(left))
    problem = book.problem
    if problem.goal.objective == "throughput" and problem.workload.num_sequences > MAX_EVERY:
        bound = min(bound, candidates.least_between * (1 - ROUGH))
    return bound


# The largest batch of an arrangement.


def largest_of(plan: GenerationPlan, num_sequences: int) -> int:
    """The largest batch that leaves no micro-batch of the plan empty; 0 where none does."""
    others = plan.num_micro_batches - 1
    return (num_sequences - 1) // others if others else num_sequences


def find_largest_batch(
    book: Book, arrangement: GenerationPlan, *, at_least: int = 1, at_most: int | None = None
) -> int:
    """Number of sequences that fit at once, between ``at_least`` and ``at_most``; 0 where none do.

    Where sequences differ, a larger batch may be parted elsewhere and peak lower, so all that may fit are looked at, from the
    largest on: of more than ``MAX_EVERY`` the even splits, and in the gap above the best of these as far as halving finds more.
    """
    workload = book.problem.workload
    largest = largest_of(arrangement, workload.num_sequences)
    largest = largest if at_most is None else min(largest, at_most)

    def fits(size: int) -> bool:
        return book.problem.fits(book.price(replace(arrangement, batch_size=size)))

    def near(low: int, high: int) -> int:
        return _guess(book, arrangement, low, high)

    if not workload.is_even:
        return _largest_of_uneven(book.problem, arrangement, fits, low=at_least, high=largest)
    if at_least > largest or not fits(at_least):
        return 0
    return _largest(fits, low=at_least, high=largest, near=near)


def _largest_of_uneven(
    problem: GenerationProblem, arrangement: GenerationPlan, fits: Callable[[int], bool], *, low: int, high: int
) -> int:
    if low > high:
        return 0
    splits = list_batches(problem.workload.num_sequences)
    within = [size for size in _may_fit(problem, arrangement, splits) if low < size <= high]
    best = next((size for size in (*reversed(within), low) if fits(size)), 0)
    above = min(size for size in (*splits, high + 1) if size > best)
    while best and above - best > 1:
        middle = (best + above) // 2
        best, above = (middle, above) if fits(middle) else (best, middle)
    return best


def _may_fit(problem: GenerationProblem, arrangement: GenerationPlan, sizes: list[int]) -> list[int]:
    """Those whose floors are within all budgets."""
    floors = problem.floors(arrangement, sizes, [arrangement.num_micro_batches])
    pairs = (
        (floors.device_bytes, problem.goal.device_budget_bytes),
        (floors.host_bytes, problem.host_budget_bytes),
        (floors.disk_bytes, problem.disk_budget_bytes),
        (floors.remote_bytes, problem.remote_budget_bytes),
    )
    return [size for index, size in enumerate(sizes) if all(held[0, index] <= room for held, room in pairs)]


def _largest(fits: Callable[[int], bool], *, low: int, high: int, near: Callable[[int, int], int]) -> int:
    """``fits(low)`` holds, and up to some size all do. near: a guess at the last between two."""
    if low == high or fits(high):
        return high
    while high - low > 1:
        guess = near(low, high)
        # Peaks are nearly straight lines, so mostly the first two settle it; halving makes sure that it ends soon.
        for size in (guess, guess + 1, (low + high) // 2):
            if low < size < high:
                low, high = (size, high) if fits(size) else (low, size)
    return low


def _guess(book: Book, arrangement: GenerationPlan, low: int, high: int) -> int:
    """The size at which the line through both sizes' peaks meets the budget."""
    ends = [book.price(replace(arrangement, batch_size=size)).device_peak_high_bytes for size in (low, high)]
    room_bytes = book.problem.goal.device_budget_bytes - ends[0]
    return low + int((high - low) * room_bytes / (ends[1] - ends[0])) if ends[1] > ends[0] else (low + high) // 2
