"""What can be done outside the blocks, in order of strength: where gradients, optimizer state and weights live, and in how
many chunks the loss is made.

A home says where the three live. Homes are few, because a plan in which they contradict each other is no plan
(``Plan.find_conflict``): state leaves the device only after gradients, trained weights only after all state. Disk is looked
at only where the host is too small for the same home there.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, get_args

from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.weights import WeightsPlace
from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.grid import PREFETCHES, chunk_counts, fraction_steps
from optimizer.search.solver.pricebook import PriceBook


def homes_of(book: PriceBook, base: OuterPlan) -> list[OuterPlan]:
    """The base and all that the goal, the machine and the host's room allow, from weakest to strongest."""
    return [home for home in all_homes(book, base) if not _has_nearer(book, home)]


def all_homes(book: PriceBook, base: OuterPlan) -> list[OuterPlan]:
    """The same, also where access is slower than the host's room makes it need to be."""
    homes = (
        replace(base, gradients=gradients, state_place=state, weights_place=weights)
        for gradients, state, weights in _HOMES
    )
    return [home for home in homes if book.problem.permits_setting(home)]


def with_chunks(book: PriceBook, setting: OuterPlan) -> list[OuterPlan]:
    """The setting with one chunk and with more, where that is allowed."""
    problem = book.problem
    if not problem.allows("chunked_loss") or "num_chunks" in problem.pinned_levers:
        return [setting]
    counts = chunk_counts(setting, tokens=problem.workload.sequence_length)
    return [replace(setting, num_chunks=count) for count in counts]


def with_prefetch(book: PriceBook, setting: OuterPlan) -> list[OuterPlan]:
    if setting.weights_place == "device" or "prefetch" in book.problem.pinned_levers:
        return [setting]
    return [replace(setting, prefetch=prefetch) for prefetch in PREFETCHES]


def variants_of(book: PriceBook, base: OuterPlan) -> Iterator[OuterPlan]:
    """Every home of the base with every count of chunks and every prefetch that is tried first."""
    for home in homes_of(book, base):
        for chunked in with_chunks(book, home):
            yield from with_prefetch(book, chunked)


def has_free_fraction(book: PriceBook, setting: OuterPlan) -> bool:
    """Whether a part of the state may stay on the device."""
    is_pinned = "state_fraction" in book.problem.pinned_levers
    return setting.state_place != "device" and setting.weights_place == "device" and not is_pinned


def smallest_fraction(book: PriceBook, setting: OuterPlan, per_block: PerBlock) -> OuterPlan | None:
    """With the least share of the state off the device with which the device budget holds; None where none does."""
    steps = fraction_steps(book.problem.num_blocks)

    def fits(step: int) -> bool:
        prediction = book.price(replace(setting, state_fraction=step / steps), per_block)
        return book.problem.fits_device(prediction)

    high = round(setting.state_fraction * steps)
    if not fits(high):
        return None
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return replace(setting, state_fraction=high / steps)


def largest_fraction(book: PriceBook, setting: OuterPlan) -> OuterPlan | None:
    """With the largest share of the state for which host and disk have room; None where they have none for any."""
    per_block, steps = _with_least_elsewhere(book), fraction_steps(book.problem.num_blocks)

    def fits(step: int) -> bool:
        prediction = book.price(replace(setting, state_fraction=step / steps), per_block)
        return book.problem.fits_elsewhere(prediction)

    if "state_fraction" in book.problem.pinned_levers:
        return setting if book.problem.fits_elsewhere(book.price(setting, per_block)) else None
    if fits(steps):
        return setting
    if not has_free_fraction(book, setting) or not fits(1):
        return None
    low, high = 1, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(setting, state_fraction=low / steps)


def _has_nearer(book: PriceBook, home: OuterPlan) -> bool:
    """Whether what the home puts on disk has room on the host, where access is faster."""
    nearer = replace(
        home,
        state_place="host" if home.state_place == "disk" else home.state_place,
        weights_place="host" if home.weights_place == "disk" else home.weights_place,
    )
    if nearer == home:
        return False
    if not book.problem.permits_setting(nearer):
        return False
    return book.problem.fits_elsewhere(book.price(nearer, _with_least_elsewhere(book)))


def _with_least_elsewhere(book: PriceBook) -> PerBlock:
    lightest = (book.problem.rebuilding or ("keep",))[0]
    return book.problem.pinned_blocks or (lightest,) * book.problem.num_blocks


def _strength(home: tuple[GradientsChoice, StatePlace, WeightsPlace]) -> tuple[int, int, int]:
    gradients, state, weights = home
    order = ("device", "host", "disk")
    return order.index(weights), order.index(state), ("keep", "consume", "host").index(gradients)


_HOMES: Final = tuple(
    sorted(
        (
            (gradients, state, weights)
            for gradients in get_args(GradientsChoice)
            for state in get_args(StatePlace)
            for weights in get_args(WeightsPlace)
        ),
        key=_strength,
    )
)
"""All that can be written down; most contradict themselves or the workload."""


def is_weaker(home: OuterPlan, other: OuterPlan) -> bool:
    """Whether the other leaves no more on the device, wherever it looks."""
    places = (home.gradients, home.state_place, home.weights_place)
    others = (other.gradients, other.state_place, other.weights_place)
    return all(_DEVICE_RANK[a] >= _DEVICE_RANK[b] for a, b in zip(places, others, strict=True))


_DEVICE_RANK: Final = {"keep": 2, "consume": 1, "device": 1, "host": 0, "disk": 0}
"""Higher leaves more on the device."""
