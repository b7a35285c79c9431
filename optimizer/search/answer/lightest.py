"""Prices the few plans that can be a problem's smallest."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from optimizer.search.problem import OuterPlan
from optimizer.search.solver.floors import Floor, has_floors, light_bases, list_floors
from optimizer.search.solver.grid import with_chunks, with_prefetch
from optimizer.search.solver.levers import homes_of, largest_fraction, with_least_elsewhere
from optimizer.search.solver.lines import lightest_bytes, mixed_lines, plain_lines, pure_offload_lines
from optimizer.search.solver.pricebook import PriceBook

MAX_FLOORS = 12
"""Settings whose lightest plans are priced, by their floors."""
NUM_LIGHTEST = 3
"""Settings, lightest first, whose mixtures are priced as well."""


def price_floor(book: PriceBook) -> PriceBook:
    """Only what can be smallest: one sequence at a time, and the whole batch, which sums no gradients."""
    problem = book.problem
    if has_floors(problem):
        _price_by_floors(book, list_floors(problem))
        return book
    candidates: dict[OuterPlan, int] = {}
    for base in light_bases(problem):
        book.keep_all_ms(base)
        candidates.update({setting: lightest_bytes(book, setting) for setting in _light_settings(book, base)})
    for setting in sorted(candidates, key=lambda setting: (candidates[setting], repr(setting)))[:NUM_LIGHTEST]:
        price_lightest(book, setting)
    return book


def _price_by_floors(book: PriceBook, floors: Sequence[Floor]) -> None:
    """Settings from the lightest floor on, until none can hold a smaller plan than was found."""
    book.keep_all_ms(book.problem.settings()[0])
    least_bytes = float("inf")
    candidates: dict[OuterPlan, int] = {}
    for floor in floors:
        if floor.num_bytes >= least_bytes or len(candidates) >= MAX_FLOORS:
            break
        setting = largest_fraction(book, floor.setting)
        if setting is not None:
            candidates[setting] = lightest_bytes(book, setting)
            if book.problem.fits_elsewhere(book.price(setting, with_least_elsewhere(book))):
                least_bytes = min(least_bytes, candidates[setting])
    for setting in sorted(candidates, key=lambda setting: (candidates[setting], repr(setting)))[:NUM_LIGHTEST]:
        price_lightest(book, setting)


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


def price_lightest(book: PriceBook, setting: OuterPlan) -> int:
    """Price the plans of a setting that could have its least peak; the least upper end found."""
    highs = [lightest_bytes(book, setting)]
    for line in [*plain_lines(book), *pure_offload_lines(book, setting), *mixed_lines(book, setting)]:
        for index in (0, 1):
            if index <= line.length:
                highs.append(book.price(setting, line.per_block(index)).device_peak_high_bytes)
    return min(highs)
