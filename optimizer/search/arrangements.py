"""From counts to positions: which of identical blocks keep, recompute or offload, once it is known how many do.

Blocks that keep stand last. A saved byte of the last block lives from the end of forward to the start of backward, one
of the first block lives through the whole backward, beside gradients that grow; so keeping the tail never has the
higher peak. Offloaded blocks stand first, where the copy out has the whole of forward to hide in and the copy back the
whole of backward, or are spread, so that each copy hides behind a neighbour that computes. Which of the two is faster
depends on the link, so both are tried.
"""

from dataclasses import dataclass
from typing import Literal

from optimizer.plan.activations import BlockChoice

Arrangement = Literal["first", "spread"]
PerBlock = tuple[BlockChoice, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Plans in a row: one more block keeps from each to the next, so bytes go up and time goes down along it."""

    num_blocks: int
    arrangement: Arrangement
    num_offload: int | None
    """Blocks that offload, the rest recompute; None where all that do not keep offload."""

    @property
    def max_keep(self) -> int:
        return self.num_blocks - (self.num_offload or 0)

    def per_block(self, num_keep: int) -> PerBlock:
        if self.num_offload is None:
            return arrange_offload_only(self.num_blocks, num_keep=num_keep, arrangement=self.arrangement)
        return arrange(self.num_blocks, num_keep=num_keep, num_offload=self.num_offload, arrangement=self.arrangement)


def arrange(num_blocks: int, *, num_keep: int, num_offload: int, arrangement: Arrangement) -> PerBlock:
    """The last ``num_keep`` keep; of the others ``num_offload`` offload and the rest recompute."""
    num_others = num_blocks - num_keep
    offloaded = _positions(num_others, num_offload, arrangement)
    others: list[BlockChoice] = ["offload" if index in offloaded else "recompute" for index in range(num_others)]
    kept: list[BlockChoice] = ["keep"] * num_keep
    return (*others, *kept)


def arrange_offload_only(num_blocks: int, *, num_keep: int, arrangement: Arrangement) -> PerBlock:
    """For goals without recompute: spread mixes offloaded blocks with kept ones, behind whose compute they hide."""
    offloaded = _positions(num_blocks, num_blocks - num_keep, arrangement)
    return tuple("offload" if index in offloaded else "keep" for index in range(num_blocks))


def keep_everything(num_blocks: int) -> PerBlock:
    """Plain training's choice."""
    choices: PerBlock = ("keep",)
    return choices * num_blocks


def summarize(per_block: PerBlock) -> str:
    """In a few words: ``keep 4, recompute 8``."""
    choices: tuple[BlockChoice, ...] = ("keep", "recompute", "offload")
    return ", ".join(f"{choice} {per_block.count(choice)}" for choice in choices if choice in per_block)


def _positions(num_places: int, num_chosen: int, arrangement: Arrangement) -> frozenset[int]:
    if arrangement == "first" or num_chosen == 0:
        return frozenset(range(num_chosen))
    return frozenset(index * num_places // num_chosen for index in range(num_chosen))
