"""The choices outside the blocks that prices decide: for which homes there is room, and how much of the state leaves.

``grid.py`` lists what is permitted at all. A home says where gradients, optimizer state and weights live. Homes are few, because
a plan in which they contradict each other is no plan (``Plan.find_conflict``): state leaves the device only after gradients,
trained weights only after all state. Disk and remote store are looked at only where the host has no room for
the same home.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from optimizer.search.arrangements import PerBlock
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.grid import (
    all_homes,
    fraction_steps,
    has_free_fraction,
    on_host,
    with_chunks,
    with_prefetch,
)
from optimizer.search.solver.pricebook import PriceBook


def homes_of(book: PriceBook, base: OuterPlan) -> list[OuterPlan]:
    """The base and all that the goal, the machine and the host's room allow, from weakest to strongest."""
    return [home for home in all_homes(book.problem, base) if not _has_nearer(book, home)]


def variants_of(book: PriceBook, base: OuterPlan) -> Iterator[OuterPlan]:
    """Every home of the base with every count of chunks and every prefetch that is tried first."""
    for home in homes_of(book, base):
        for chunked in with_chunks(book.problem, home):
            yield from with_prefetch(book.problem, chunked)


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
    """With the largest share of the state for which the tiers have room; None where they have none for any."""
    per_block, steps = with_least_elsewhere(book), fraction_steps(book.problem.num_blocks)

    def fits(step: int) -> bool:
        prediction = book.price(replace(setting, state_fraction=step / steps), per_block)
        return book.problem.fits_elsewhere(prediction)

    if "state_fraction" in book.problem.pinned_levers:
        return setting if book.problem.fits_elsewhere(book.price(setting, per_block)) else None
    if fits(steps):
        return setting
    if not has_free_fraction(book.problem, setting) or not fits(1):
        return None
    low, high = 1, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(setting, state_fraction=low / steps)


def _has_nearer(book: PriceBook, home: OuterPlan) -> bool:
    """True where what the home puts in a store has room on the host, where access is faster."""
    nearer = on_host(home)
    if nearer == home:
        return False
    if not book.problem.permits_setting(nearer):
        return False
    return book.problem.fits_elsewhere(book.price(nearer, with_least_elsewhere(book)))


def with_least_elsewhere(book: PriceBook) -> PerBlock:
    """Blocks that hold nothing on the other tiers, where that is left open."""
    lightest = (book.problem.rebuilding or ("keep",))[0]
    return book.problem.pinned_blocks or (lightest,) * book.problem.num_blocks


def is_weaker(home: OuterPlan, other: OuterPlan) -> bool:
    """Report whether the other leaves no more on the device, wherever it looks."""
    places = (home.gradients, home.state_place, home.weights_place)
    others = (other.gradients, other.state_place, other.weights_place)
    return all(_DEVICE_RANK[a] >= _DEVICE_RANK[b] for a, b in zip(places, others, strict=True))


_DEVICE_RANK: Final = {"keep": 2, "consume": 1, "device": 1, "host": 0, "disk": 0, "remote": 0}
"""Higher leaves more on the device."""
