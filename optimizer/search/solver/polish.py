"""The last step of a search: change the best plan here and there while that makes it faster.

Catches what no line holds, such as one odd block, a count of chunks or a share of the state between those tried first, and
levers that the blocks as chosen do not need.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from optimizer.plan.activations import BlockChoice
from optimizer.search.arrangements import PerBlock, common_kinds
from optimizer.search.problem import OuterPlan
from optimizer.search.solver.grid import (
    MAX_PREFETCH,
    has_free_fraction,
    with_chunks,
)
from optimizer.search.solver.levers import homes_of, smallest_fraction
from optimizer.search.solver.lines import search_by_kind
from optimizer.search.solver.pricebook import PriceBook

_FASTER: tuple[tuple[BlockChoice, BlockChoice], ...] = (
    ("recompute", "keep"),
    ("recompute", "selective"),
    ("selective", "keep"),
    ("offload_disk", "offload_remote"),
    ("offload_disk", "offload"),
    ("offload_remote", "offload"),
    ("offload", "selective"),
    ("offload", "keep"),
    ("recompute", "offload"),
)
"""Exchanges that may make a block faster for more bytes, on the device or nearer to it."""

def polish(book: PriceBook, *, is_worth: Callable[[OuterPlan], bool] = lambda _: True) -> None:
    """Leaves ``book.best`` where no single change improves it. is_worth: whether a setting may hold a faster plan."""
    if book.best is not None and book.problem.pinned_blocks is None and is_worth(_best(book)[0]):
        plan, _ = book.best
        search_by_kind(book, OuterPlan.of(plan), num_offload=plan.activations.num_offloaded)
    book.begin_polishing()
    improved = book.best is not None
    while improved and book.best is not None and not book.is_polished:
        before_ms = book.best_step_ms
        are_blocks_free = book.problem.pinned_blocks is None
        if are_blocks_free and is_worth(_best(book)[0]):
            _fill(book, *_best(book))
        _change_levers(book, *_best(book), is_worth)
        if are_blocks_free and is_worth(_best(book)[0]):
            _change_blocks(book, *_best(book))
        improved = book.best_step_ms < before_ms


def _best(book: PriceBook) -> tuple[OuterPlan, PerBlock]:
    assert book.best is not None
    plan, _ = book.best
    return OuterPlan.of(plan), plan.activations.per_block


def _fill(book: PriceBook, setting: OuterPlan, per_block: PerBlock) -> None:
    """Give as many blocks as fit a faster choice, the last ones first; where blocks differ also those of one kind first."""
    kinds = book.problem.kinds
    names = common_kinds(kinds)
    groups = [tuple(range(len(kinds)))]
    if len(names) > 1:
        groups += [tuple(block for block, kind in enumerate(kinds) if kind == name) for name in names]
    for group in groups:
        filled = _filled(book, setting, per_block, group)
        if len(group) < len(kinds):
            _filled(book, setting, filled, groups[0])


def _filled(book: PriceBook, setting: OuterPlan, per_block: PerBlock, group: tuple[int, ...]) -> PerBlock:
    """The blocks that come of it where only those of a group change."""
    for slow, fast in _FASTER:
        places = [index for index in group if per_block[index] == slow]
        if places and fast in book.problem.choices and not book.is_polished:
            per_block = _exchange_most(book, setting, per_block, places=places, fast=fast)
    return per_block


def _exchange_most(
    book: PriceBook, setting: OuterPlan, per_block: PerBlock, *, places: list[int], fast: BlockChoice
) -> PerBlock:

    def exchanged(count: int) -> PerBlock:
        chosen = frozenset(places[len(places) - count :])
        return tuple(fast if index in chosen else choice for index, choice in enumerate(per_block))

    first = book.price(setting, exchanged(1))
    if not book.problem.fits(first) or first.step_ms >= book.price(setting, per_block).step_ms:
        return per_block
    low, high = 1, len(places) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if book.problem.fits(book.price(setting, exchanged(middle))) else (low, middle)
    return exchanged(low)


def _change_levers(
    book: PriceBook, setting: OuterPlan, per_block: PerBlock, is_worth: Callable[[OuterPlan], bool]
) -> None:
    """With the same blocks, and with those that then fit."""
    for changed in _neighbour_settings(book, setting, per_block):
        if book.is_polished:
            return
        if not is_worth(changed):
            continue
        if book.problem.fits(book.price(changed, per_block)):
            _use_room(book, changed, per_block)


def _use_room(book: PriceBook, setting: OuterPlan, per_block: PerBlock) -> None:
    """More of the state stays on the device, or the loss is made in fewer chunks, or more blocks take a faster choice."""
    if has_free_fraction(book.problem, setting):
        smallest_fraction(book, setting, per_block)
    if setting.num_chunks > 1:
        book.price(replace(setting, num_chunks=setting.num_chunks // 2), per_block)
    if book.problem.pinned_blocks is None:
        _fill(book, setting, per_block)


def _neighbour_settings(book: PriceBook, setting: OuterPlan, per_block: PerBlock) -> Iterator[OuterPlan]:
    """Another home or number of prefetched blocks, each with other counts of chunks: a chunk's room is what often allows it."""
    if has_free_fraction(book.problem, setting):
        fitted = smallest_fraction(book, setting, per_block)
        if fitted is not None:
            yield fitted
    usual = [chunked.num_chunks for chunked in with_chunks(book.problem, setting)]
    counts = {*usual, setting.num_chunks, setting.num_chunks // 2, setting.num_chunks * 2}
    for moved in dict.fromkeys([setting, *_moved(book, setting)]):
        yield from (replace(moved, num_chunks=count) for count in sorted(counts) if 1 <= count <= usual[-1])


def _moved(book: PriceBook, setting: OuterPlan) -> Iterator[OuterPlan]:
    for home in homes_of(book, replace(setting.base, **book.problem.pinned_levers)):
        moved = replace(
            setting,
            gradients=home.gradients,
            state_place=home.state_place,
            state_fraction=home.state_fraction,
            weights_place=home.weights_place,
        )
        if not moved.brings_weights:
            yield moved
        else:
            yield from (replace(moved, prefetch=number) for number in range(MAX_PREFETCH + 1))


def _change_blocks(book: PriceBook, setting: OuterPlan, per_block: PerBlock) -> None:
    """Single blocks; where one is slower, it takes fewer bytes, and others may take more."""
    before_ms = book.price(setting, per_block).step_ms
    for changed in _neighbours(book, per_block):
        if book.is_polished:
            return
        prediction = book.price(setting, changed)
        if prediction.step_ms >= before_ms and book.problem.fits(prediction):
            _use_room(book, setting, changed)


def _neighbours(book: PriceBook, per_block: PerBlock) -> Iterator[PerBlock]:
    """One block changed, of each kind the first and last of each run only: blocks inside a run are alike."""
    for index in sorted(_ends_of_runs(book.problem.kinds, per_block)):
        for other in book.problem.choices:
            if other != per_block[index]:
                yield (*per_block[:index], other, *per_block[index + 1 :])


def _ends_of_runs(kinds: tuple[int, ...], per_block: PerBlock) -> Iterator[int]:
    for kind in set(kinds):
        blocks = [block for block, other in enumerate(kinds) if other == kind]
        for at, block in enumerate(blocks):
            beside = (per_block[other] for other in (*blocks[max(0, at - 1) : at], *blocks[at + 1 : at + 2]))
            if at in (0, len(blocks) - 1) or any(choice != per_block[block] for choice in beside):
                yield block
