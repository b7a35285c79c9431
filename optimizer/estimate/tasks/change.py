"""One change of bytes within a part, with the op and the storage that it comes or goes with."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from optimizer.base.categories import Category, Link, Tier
from optimizer.estimate.kernels.held import OpCall
from optimizer.plan.activations import BlockChoice

Change = tuple[Tier, int, int]
"""Tier, place of the category, bytes."""
PartName = str | tuple[BlockChoice, int, str]
"""A name of PART_NAMES, or (choice, template, ``forward`` | ``backward_first`` | ``backward_accumulate``)."""
Arrival = tuple[int, Category, int]
"""Bytes that come after an op of a part and are not traced with it: the op, the category, the bytes."""
FROM_PROLOGUE = -2
"""Storage number of one of those that the micro-batch made before its blocks."""
NO_COPIES: Mapping[Link, int] = MappingProxyType({})


class Move(NamedTuple):
    """A change with what it comes or goes with, for people and for replays of what is allocated."""

    tier: Tier
    slot: int
    num_bytes: int
    op: int
    """Number of the op in its part; -1 is before the first."""
    op_name: str = ""
    storage: int = -1
    """Number of a storage born in this part; -1 where it was there before, or is not known; FROM_PROLOGUE."""
    call: OpCall | None = None
    """The op's sizes, for what its kernel holds; None where they are not known."""
    slack: tuple[int, int] = (0, 0)
    """Bytes fewer and more that it may be, of what a kernel holds."""
