"""From counts to positions: which of identical blocks keep, recompute or offload, once it is known how many do.

Blocks that keep stand last. A saved byte of the last block lives from the end of forward to the start of backward, one
of the first block lives through the whole backward, beside gradients that grow; so keeping the tail never has the
higher peak; for the same reason selective stands behind recompute. Offloaded blocks stand first, where the copy out has
the whole of forward to hide in and the copy back the whole of backward, or are spread, so that each copy hides behind a
neighbour that computes. Which of the two is faster depends on the link, so both are tried. Blocks of several kinds can also
stand kind by kind, since those of one kind may save more bytes for their time than those of another.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from optimizer.plan.activations import BlockChoice

Arrangement = Literal["first", "spread"]
PerBlock = tuple[BlockChoice, ...]
MAX_KINDS = 3
"""Most kinds of blocks that are distinguished."""


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """Plans in a row: from each to the next one more block does more of its saving on the device, so bytes go up and
    time goes down along it."""

    num_blocks: int
    arrangement: Arrangement = "first"
    num_offload: int | None = 0
    """Blocks that offload; None where all that do not keep offload."""
    offload: BlockChoice = "offload"
    """Place of the offloaded blocks."""
    steps: PerBlock = ("recompute", "keep")
    """Choices of the other blocks, from lightest to heaviest: all take the first, then one by one the second, and so on."""
    order: tuple[int, ...] | None = None
    """Order of the blocks in the row; None for the model's own order."""

    @property
    def length(self) -> int:
        """Index of the heaviest plan; 0 is the lightest."""
        if self.num_offload is None:
            return self.num_blocks
        return (self.num_blocks - self.num_offload) * (len(self.steps) - 1)

    def per_block(self, index: int) -> PerBlock:
        found = self._in_a_row(index)
        if self.order is None:
            return found
        by_block = dict(zip(self.order, found, strict=True))
        return tuple(by_block[block] for block in range(self.num_blocks))

    def _in_a_row(self, index: int) -> PerBlock:
        if self.num_offload is None:
            return arrange_offload_only(
                self.num_blocks, num_keep=index, arrangement=self.arrangement, offload=self.offload
            )
        num_rest = self.num_blocks - self.num_offload
        level, num_risen = divmod(index, num_rest) if num_rest else (0, 0)
        rest = (self.steps[level],) * (num_rest - num_risen)
        if num_risen:
            rest = (*rest, *(self.steps[level + 1],) * num_risen)
        return arrange(rest, num_offload=self.num_offload, arrangement=self.arrangement, offload=self.offload)


def arrange(
    rest: PerBlock, *, num_offload: int, arrangement: Arrangement, offload: BlockChoice = "offload"
) -> PerBlock:
    """``rest`` in its order, and the offloaded blocks first, or in turns with those of the rest that do not keep."""
    num_keep = rest.count("keep") if rest and rest[-1] == "keep" else 0
    num_others = len(rest) + num_offload - num_keep
    offloaded = _positions(num_others, num_offload, arrangement)
    waiting = iter(rest)
    return tuple(offload if index in offloaded else next(waiting) for index in range(len(rest) + num_offload))


def arrange_offload_only(
    num_blocks: int, *, num_keep: int, arrangement: Arrangement, offload: BlockChoice = "offload"
) -> PerBlock:
    """For goals without recompute: spread mixes offloaded blocks with kept ones, behind whose compute they hide."""
    offloaded = _positions(num_blocks, num_blocks - num_keep, arrangement)
    return tuple(offload if index in offloaded else "keep" for index in range(num_blocks))


def orders_by_kind(kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Each kind once before all others, which stand as they are; empty where all blocks are alike. Of many kinds those with most
    blocks. kinds: of each block."""
    names = common_kinds(kinds)
    if len(names) < 2:
        return []
    return [tuple(sorted(range(len(kinds)), key=lambda block: (kinds[block] != first, block))) for first in names]


def common_kinds(kinds: tuple[int, ...]) -> list[int]:
    """Those with most blocks, a few."""
    return sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))[:MAX_KINDS]


def keep_everything(num_blocks: int) -> PerBlock:
    """Plain training's choice."""
    choices: PerBlock = ("keep",)
    return choices * num_blocks


def summarize(per_block: PerBlock) -> str:
    """In a few words: ``keep 4, recompute 8``."""
    choices: PerBlock = get_args(BlockChoice)
    counts = [(choice, per_block.count(choice)) for choice in choices]
    return ", ".join(f"{choice.replace('_', ' to ')} {count}" for choice, count in counts if count)


def _positions(num_places: int, num_chosen: int, arrangement: Arrangement) -> frozenset[int]:
    if arrangement == "first" or num_chosen == 0:
        return frozenset(range(num_chosen))
    return frozenset(index * num_places // num_chosen for index in range(num_chosen))
