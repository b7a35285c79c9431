"""Lines of plans inside one setting: which there are, and the last plan of one that fits, in few prices.

With the number of offloaded blocks fixed, each further block that keeps costs bytes and saves time, so the best plan of a
line is the last that fits: found by interpolation and bisection over exact prices. Lines differ in the number of offloaded
blocks; all are tried on shallow models, on deep ones a grid that narrows around the best.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from optimizer.plan.activations import BlockChoice, Compression
from optimizer.search.arrangements import Arrangement, PerBlock, PlanLine, orders_by_kind
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.pricebook import PriceBook

MAX_BLOCKS_FOR_ALL_LINES = 12
"""Up to this depth every number of offloaded blocks is tried."""
NUM_GRID_CELLS = 4
"""Beyond it, offloaded counts start this many cells apart."""
INFINITE_MS: Final = float("inf")
_ARRANGEMENTS: Final[tuple[Arrangement, ...]] = ("first", "spread")


def search_line(book: PriceBook, setting: OuterPlan, line: PlanLine) -> float:
    """Price the line's last member that fits; its step time, or infinity where none does or none could be best."""
    fastest = book.price(setting, line.per_block(line.length))
    if fastest.step_ms > book.best_step_ms or book.is_full:
        return INFINITE_MS
    index = last_that_fits(book, setting, line)
    if index is None:
        return INFINITE_MS
    prediction = book.price(setting, line.per_block(index))
    return prediction.step_ms if book.problem.fits(prediction) else INFINITE_MS


def last_that_fits(book: PriceBook, setting: OuterPlan, line: PlanLine) -> int | None:
    """Index of the heaviest plan within the device budget. Bytes elsewhere only fall along a line, so they are looked at
    once, at the answer."""
    budget_bytes = book.problem.goal.device_budget_bytes

    def high_bytes(index: int) -> int:
        return book.price(setting, line.per_block(index)).device_peak_high_bytes

    high = line.length
    if high_bytes(high) <= budget_bytes:
        return high
    low = next((index for index in (0, 1) if index < high and high_bytes(index) <= budget_bytes), None)
    if low is None:
        return None
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        if interpolate:
            share = (budget_bytes - high_bytes(low)) / (high_bytes(high) - high_bytes(low))
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        interpolate = not interpolate
        low, high = (middle, high) if high_bytes(middle) <= budget_bytes else (low, middle)
    return low


def pure_choices(book: PriceBook) -> tuple[BlockChoice, ...]:
    """Choices that all blocks can take alike; of the tiers that blocks can move to, the nearest."""
    return ("keep", *book.problem.rebuilding, *book.problem.offloading[:1])


def pure_blocks(book: PriceBook) -> list[PerBlock]:
    """The blocks of plans whose blocks all do the same; where they are pinned, what they are pinned to."""
    pinned = book.problem.pinned_blocks
    return [all_blocks(book, choice) for choice in pure_choices(book)] if pinned is None else [pinned]


def all_blocks(book: PriceBook, choice: BlockChoice) -> PerBlock:
    return (choice,) * book.problem.num_blocks


def lightest_bytes(book: PriceBook, setting: OuterPlan) -> int:
    """The least upper end of the peak among plans whose blocks all do the same, or what they are pinned to."""
    pinned = book.problem.pinned_blocks
    if pinned is not None:
        return book.price(setting, pinned).device_peak_high_bytes
    choices = [choice for choice in pure_choices(book) if choice != "selective"]
    return min(book.price(setting, all_blocks(book, choice)).device_peak_high_bytes for choice in choices)


def plain_lines(book: PriceBook) -> list[PlanLine]:
    """Rebuilding against keeping, where that is allowed: with selective between the two, and without."""
    depth = book.problem.num_blocks
    if book.problem.pinned_blocks is not None:
        return []
    return [PlanLine(num_blocks=depth, steps=steps) for steps in ladders(book)]


def pure_offload_lines(book: PriceBook, setting: OuterPlan) -> Iterator[PlanLine]:
    """Offloading against keeping, to farther tiers only where the host has no room for all blocks."""
    depth = book.problem.num_blocks
    if book.problem.pinned_blocks is not None:
        return
    for choice in useful_offloading(book, setting):
        for arrangement in _ARRANGEMENTS:
            yield PlanLine(num_blocks=depth, arrangement=arrangement, num_offload=None, offload=choice)


def mixed_lines(book: PriceBook, setting: OuterPlan) -> Iterator[PlanLine]:
    """A grid over the number of offloaded blocks, for each way of offloading and rebuilding."""
    for line in mixtures(book, setting):
        yield from (replace(line, num_offload=count) for count in offload_grid(line.num_blocks)[1:])


def useful_offloading(book: PriceBook, setting: OuterPlan) -> Iterator[BlockChoice]:
    """Nearest first; the next only where the ones before have no room for all blocks."""
    for choice in book.problem.offloading:
        yield choice
        if book.problem.fits_elsewhere(book.price(setting, all_blocks(book, choice))):
            return


def with_compression(book: PriceBook, setting: OuterPlan) -> list[OuterPlan]:
    """The plan as it is, and with the compression that makes offloading all blocks fastest, where one does."""
    if not book.problem.allows("compress") or not book.problem.offloading or "compress" in book.problem.pinned_levers:
        return [setting]
    offloaded = all_blocks(book, book.problem.offloading[0])
    names: tuple[Compression, ...] = ("none", "bf16", "int8")
    compressed = [replace(setting, compress=name) for name in names]
    fastest = min(compressed, key=lambda candidate: book.price(candidate, offloaded).step_ms)
    return [setting] if fastest == setting else [setting, fastest]


def search_mixtures(book: PriceBook, setting: OuterPlan) -> None:
    for compressed in with_compression(book, setting):
        for line in mixtures(book, compressed):
            search_mixture(book, compressed, line)


def search_around(book: PriceBook, setting: OuterPlan, line: PlanLine, *, num_offload: int) -> None:
    """With this number of offloaded blocks, and those beside it while that is faster."""
    depth = line.num_blocks

    def best_ms(count: int) -> float:
        return search_line(book, setting, replace(line, num_offload=count))

    times = {count: best_ms(count) for count in (num_offload,) if 0 < count <= depth}
    for step in (-1, 1):
        count = num_offload + step
        while 0 < count <= depth and best_ms(count) < min(times.values(), default=INFINITE_MS):
            times[count] = best_ms(count)
            count += step


def search_by_kind(book: PriceBook, setting: OuterPlan, *, num_offload: int) -> None:
    """The setting's lines with each kind of block once before the others. num_offload: blocks that leave in mixtures, about."""
    for order in orders_by_kind(book.problem.kinds):
        for line in [*plain_lines(book), *pure_offload_lines(book, setting)]:
            search_line(book, setting, replace(line, order=order))
        for line in mixtures(book, setting) if num_offload else ():
            search_around(book, setting, replace(line, order=order), num_offload=num_offload)


def search_mixture(book: PriceBook, setting: OuterPlan, line: PlanLine) -> None:
    """For every number of offloaded blocks, or those around the best."""
    if book.problem.num_blocks <= MAX_BLOCKS_FOR_ALL_LINES:
        for count in range(1, line.num_blocks + 1):
            search_line(book, setting, replace(line, num_offload=count))
    else:
        _narrow(book, setting, line)


def offload_grid(num_blocks: int) -> list[int]:
    """Numbers of offloaded blocks from none to all, a cell apart."""
    cell = -(-num_blocks // NUM_GRID_CELLS)
    return sorted({*range(0, num_blocks, cell), num_blocks})


def mixtures(book: PriceBook, setting: OuterPlan) -> Iterator[PlanLine]:
    """Without a number of offloaded blocks yet."""
    if book.problem.pinned_blocks is not None:
        return
    steepest = ladders(book)[:1]
    for choice in useful_offloading(book, setting):
        for arrangement in _ARRANGEMENTS:
            for steps in steepest:
                yield PlanLine(num_blocks=book.problem.num_blocks, arrangement=arrangement, offload=choice, steps=steps)


def ladders(book: PriceBook) -> list[PerBlock]:
    """Choices along a line for blocks that do not move."""
    if not book.problem.rebuilding:
        return []
    return [("recompute", "keep"), ("recompute", "selective", "keep")]


def _narrow(book: PriceBook, setting: OuterPlan, line: PlanLine) -> None:
    """Grid over the number of offloaded blocks, then halve the cell around the best until it is one block wide."""
    depth = line.num_blocks

    def best_ms(count: int) -> float:
        return search_line(book, setting, replace(line, num_offload=count))

    cell = -(-depth // NUM_GRID_CELLS)
    times = {count: best_ms(count) for count in offload_grid(depth)}
    while cell > 1:
        cell = -(-cell // 2)
        centre = min(times, key=lambda count: (times[count], count))
        for count in (centre - cell, centre + cell):
            if 0 <= count <= depth and count not in times:
                times[count] = best_ms(count)
