"""Enumerates arrangements and batch sizes, and passes over what cannot be better. Pure and deterministic.

What is relied on, each held to the estimator by a test:

- a pass of more sequences takes no less memory on any tier. So the largest batch that fits is bisected;
- a pass of more sequences takes at least ``1 - MAX_DIP`` of the time of one with fewer. Measured curves dip, as a product of more
  rows may run at a better rate; they do not dip further;
- a pass of some of its micro-batches takes at least their share of its time;
- no arrangement is faster than its ``fastest`` at the same batch (``levers.py``);
- a plan takes no less than its ``fastest``'s compute and its own copies do (``InferenceProblem.copies``): one after the other
  where copies hold compute up, else the longer of the two;
- what comes from the disk is no faster than from the host, and takes as much of the device.

Batch sizes are all from one to the number of sequences; beyond ``MAX_EVERY`` sequences only those that split them evenly into
some number of passes. Of those in between, which need as many passes, the bound says how much better they could be.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from optimizer.estimate.inference_prediction import InferencePrediction
from optimizer.plan.inference import InferencePlan
from optimizer.search.inference.levers import Arrangement, from_host, list_arrangements, uses_disk
from optimizer.search.inference.problem import InferenceProblem

MAX_EVERY: Final = 64
MAX_DIP: Final = 0.2
_ROUNDING: Final = 1e-9
"""Sums of the same times in another order differ by less."""
_ROUGH: Final = 1e-3
"""Prices in a search are to within less."""
_Value = tuple[float, ...]
"""What is made as small as possible; later entries decide between equals."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best plan that fits."""

    plan: InferencePlan
    bound: float
    """No permitted plan that fits has less of what the goal is about (``value_of``)."""


@dataclass
class Book:
    """What was priced, and the best of it that fits."""

    problem: InferenceProblem
    """Its price is remembered."""
    predictions: dict[InferencePlan, InferencePrediction] = field(default_factory=dict)
    best: tuple[_Value, InferencePlan] | None = None

    def price(self, plan: InferencePlan) -> InferencePrediction:
        """Whatever it is; also taken as the best where it is."""
        known = self.predictions.get(plan)
        if known is None:
            known = self.predictions[plan] = self.problem.price(plan)
        return known

    def offer(self, plan: InferencePlan) -> None:
        """Priced, and the best where it fits and nothing better was offered before."""
        prediction = self.price(plan)
        if self.problem.fits(prediction):
            value = value_of(self.problem, plan, prediction)
            if self.best is None or value < self.best[0]:
                self.best = value, plan


def value_of(problem: InferenceProblem, plan: InferencePlan, prediction: InferencePrediction) -> _Value:
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


def solve(book: Book) -> Solution | None:
    """None where nothing fits."""
    limits: dict[InferencePlan, int] = {}
    for arrangement in list_arrangements(book.problem):
        if book.problem.goal.objective == "largest_batch":
            _offer_largest(book, arrangement)
        else:
            _offer_batches(book, arrangement, limits)
    if book.best is None:
        return None
    return Solution(plan=book.best[1], bound=_bound(book, book.best, limits))


def list_batches(num_sequences: int) -> list[int]:
    """Ascending: those that are tried."""
    if num_sequences <= MAX_EVERY:
        return list(range(1, num_sequences + 1))
    found = {1}
    num_passes = 1
    while num_passes <= num_sequences:
        size = -(-num_sequences // num_passes)
        found.add(size)
        # The fewest passes that a smaller batch needs.
        num_passes = -(-num_sequences // (size - 1)) if size > 1 else num_sequences + 1
    return sorted(found)


def largest_of(plan: InferencePlan, num_sequences: int) -> int:
    """The largest batch that leaves no micro-batch of the plan empty; 0 where none does."""
    others = plan.num_micro_batches - 1
    return (num_sequences - 1) // others if others else num_sequences


def find_largest_batch(book: Book, arrangement: Arrangement, *, at_least: int = 1) -> int:
    """Of sequences that fit at once; 0 where ``at_least`` do not."""
    largest = largest_of(arrangement.plan, book.problem.workload.num_sequences)

    def fits(size: int) -> bool:
        return book.problem.fits(book.price(replace(arrangement.plan, batch_size=size)))

    if at_least > largest or not fits(at_least):
        return 0
    return _largest(fits, low=at_least, high=largest, near=lambda low, high: _guess(book, arrangement, low, high))


def _find_largest_of(book: Book, plan: InferencePlan, sizes: list[int]) -> int:
    """Of these batches, ascending, the largest that fits; 0 where none does. What a batch costs is worked out once for all
    plans, so that few different ones are asked for.
    """
    tried = [size for size in sizes if size <= largest_of(plan, book.problem.workload.num_sequences)]

    def fits(index: int) -> bool:
        return book.problem.fits(book.price(replace(plan, batch_size=tried[index])))

    if not tried or not fits(0):
        return 0
    return tried[_largest(fits, low=0, high=len(tried) - 1, near=lambda low, high: (low + high) // 2)]


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


def _guess(book: Book, arrangement: Arrangement, low: int, high: int) -> int:
    """Where the line through the peaks of both sizes meets the budget."""
    ends = [
        book.price(replace(arrangement.plan, batch_size=size)).device_peak_high_bytes for size in (low, high)
    ]
    room_bytes = book.problem.goal.device_budget_bytes - ends[0]
    return low + int((high - low) * room_bytes / (ends[1] - ends[0])) if ends[1] > ends[0] else (low + high) // 2


def _offer_largest(book: Book, arrangement: Arrangement) -> None:
    """Where a batch as large as the best so far fits."""
    at_least = 1 if book.best is None else book.best[1].batch_size
    size = find_largest_batch(book, arrangement, at_least=at_least)
    if size:
        book.offer(replace(arrangement.plan, batch_size=size))


def _offer_batches(book: Book, arrangement: Arrangement, limits: dict[InferencePlan, int]) -> None:
    """All batch sizes that may be the best. limits: gets what ``_bound`` asks for."""
    num_sequences = book.problem.workload.num_sequences
    sizes = list_batches(num_sequences)
    if uses_disk(arrangement.plan) and _is_all_on_host(book, from_host(arrangement.plan), limits):
        return
    if not _may_be_better(book, arrangement.fastest, sizes):
        limits[arrangement.fastest] = num_sequences
        return
    if _is_slower(book, arrangement.plan, 1, largest_of(arrangement.plan, num_sequences)):
        # One pass of everything would take too long already: mostly the link from the host, for which no batch size is a help.
        return
    hopeful = [size for size in sizes if not _is_surely_slower(book, arrangement, size)]
    if not hopeful:
        return
    limits[arrangement.plan] = _find_largest_of(book, arrangement.plan, hopeful)
    for size in _hopeful(book, arrangement.plan, hopeful[: bisect_right(hopeful, limits[arrangement.plan])]):
        book.offer(replace(arrangement.plan, batch_size=size))


def _is_surely_slower(book: Book, arrangement: Arrangement, size: int) -> bool:
    """Whether what must be computed and copied takes longer than the best; nothing is priced for that but the ``fastest``."""
    problem = book.problem
    if book.best is None or problem.copies is None or problem.goal.objective != "throughput":
        return False
    copies = problem.copies(arrangement.plan)
    num_sequences = problem.workload.num_sequences
    num_passes = -(-num_sequences // (size * arrangement.plan.num_micro_batches))
    copied_s = num_passes * copies.pass_s + num_sequences * copies.sequence_s
    compute_s = book.price(replace(arrangement.fastest, batch_size=size)).total_s
    least_s = max(compute_s, copied_s) if problem.has_copies_beside else compute_s + copied_s
    return least_s * (1 - _ROUGH) > book.best[0][0]


def _is_all_on_host(book: Book, plan: InferencePlan, limits: dict[InferencePlan, int]) -> bool:
    """Whether the host has room for every batch that the device has room for, so that the disk is no help."""
    size = limits.get(plan)
    if not size:
        return False
    if size >= largest_of(plan, book.problem.workload.num_sequences):
        return True
    return not book.problem.fits_device(book.price(replace(plan, batch_size=size + 1)))


def _may_be_better(book: Book, fastest: InferencePlan, sizes: list[int]) -> bool:
    """Whether anything that is no faster than this could be better than the best, had it all the memory it wants."""
    if book.best is None:
        return True
    for size in _hopeful(book, fastest, sizes):
        plan = replace(fastest, batch_size=size)
        if value_of(book.problem, plan, book.price(plan))[0] <= book.best[0][0] * (1 + _ROUNDING):
            return True
    return False


def _hopeful(book: Book, plan: InferencePlan, sizes: list[int]) -> Iterator[int]:
    """Sizes of which it is not known that they are slower than the best, from the ends inwards; the best may change meanwhile."""
    if not sizes:
        return
    yield from dict.fromkeys((sizes[-1], sizes[0]))
    ranges = [(0, len(sizes) - 1)]
    while ranges:
        low, high = ranges.pop()
        if high - low < 2 or _is_slower(book, plan, sizes[low], sizes[high - 1]):
            continue
        middle = (low + high) // 2
        yield sizes[middle]
        ranges += [(low, middle), (middle, high)]


def _is_slower(book: Book, plan: InferencePlan, low: int, high: int) -> bool:
    """Whether every batch above ``low`` and up to the last that needs as many passes as ``high`` takes more than the best."""
    if book.best is None:
        return False
    plan = replace(plan, batch_size=low)
    if book.problem.goal.objective == "first_token":
        return book.price(plan).prefill_ms * (1 - MAX_DIP) > book.best[0][0]
    num_sequences = book.problem.workload.num_sequences
    is_every = num_sequences <= MAX_EVERY
    num_full = num_sequences // high if is_every else max(1, -(-num_sequences // high) - 1)
    return num_full * _micro_batch_ms(book, plan) * (1 - MAX_DIP) / 1000 > book.best[0][0]


def _micro_batch_ms(book: Book, plan: InferencePlan) -> float:
    """A full micro-batch's share of a pass; where prompts differ, and so passes do, on average."""
    workload, prediction = book.problem.workload, book.price(plan)
    if workload.prompt_lengths or workload.new_token_counts:
        return prediction.total_s * 1000 / -(-workload.num_sequences // plan.batch_size)
    num_steps = plan.list_passes(workload)[0][0][0].num_steps
    return (prediction.prefill_ms + prediction.decode_ms * (num_steps - 1)) / plan.num_micro_batches


# The bound.


def _bound(book: Book, best: tuple[_Value, InferencePlan], limits: dict[InferencePlan, int]) -> float:
    """The best's own value where every batch was looked at; else less by what passes of other sizes could win.

    That is said of passes whose time is convex in their batch, as rooflines are: of so many passes, equal ones are the fastest.
    limits: by arrangement, the largest batch that may be taken.
    """
    lowest = best[0][0]
    num_sequences = book.problem.workload.num_sequences
    if book.problem.goal.objective != "throughput" or num_sequences <= MAX_EVERY:
        return lowest
    sizes = list_batches(num_sequences)
    for plan in list(book.predictions):
        size, limit = plan.batch_size, limits.get(replace(plan, batch_size=1), 0)
        num_micro_batches = -(-num_sequences // size)
        mean = num_sequences / num_micro_batches
        full_ms = _micro_batch_ms(book, plan)
        larger = replace(plan, batch_size=sizes[bisect_right(sizes, size)]) if size < num_sequences else plan
        if (
            size > limit
            or mean == size
            or (num_micro_batches - 1) * full_ms / 1000 > lowest
            or larger.batch_size > largest_of(plan, num_sequences)
        ):
            continue
        slope_ms = max(0.0, _micro_batch_ms(book, larger) - full_ms) / (larger.batch_size - size)
        lowest = min(lowest, num_micro_batches * (full_ms - (size - mean) * slope_ms) / 1000)
    return lowest
