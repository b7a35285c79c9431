"""Blocks of segments that the allocator's model cuts and joins, and the pools of those that are free. Torch-free."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

ADDRESS_BITS: Final = 60


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment."""

    size: int
    address: int
    pool: "Pool"
    before: "Block | None" = None
    after: "Block | None" = None
    is_free: bool = True
    is_mapped: bool = True
    """True where memory is behind it; only a segment that grows has blocks without."""
    num_uses: int = 0
    """Uses by other streams, by which it is still used."""
    born_at: int = 0
    """Searches in its pool before it became free, for the collection of garbage."""

    @property
    def is_whole(self) -> bool:
        return self.before is None and self.after is None

    @property
    def rank(self) -> int:
        """Order of free blocks: by size, then by address."""
        return self.size << ADDRESS_BITS | self.address


@dataclass(slots=True, eq=False)
class Pool:
    """The free blocks of one kind on one stream."""

    is_small: bool
    cuts_above: int
    """A block is cut where more bytes than these are left of it."""
    ranks: list[int] = field(default_factory=list)
    """Ranks of the free blocks, ascending."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """Free blocks by rank."""
    unmapped: list[Block] = field(default_factory=list)
    """Blocks without memory of the segment that grows, by address; the last is the rest of the address space."""
    base_address: int = 0
    num_searches: int = 0

    def add(self, block: Block) -> None:
        rank = block.rank
        insort(self.ranks, rank)
        self.blocks[rank] = block
        block.born_at = self.num_searches

    def remove(self, block: Block) -> None:
        rank = block.rank
        del self.ranks[bisect_left(self.ranks, rank)]
        del self.blocks[rank]

    def put_back(self, block: Block) -> None:
        """A block that is no longer in use, together with free neighbours."""
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free and other.is_mapped:
                self.remove(other)
                join(block, other)
        self.add(block)

    def cut(self, block: Block, size: int) -> Block:
        """The front of a block that is in no list; the rest stays free."""
        front = cut_front(block, size)
        self.add(block)
        return front


def cut_front(block: Block, size: int) -> Block:
    """A new block of this size; the old one is what is behind it."""
    front = Block(size, block.address, block.pool, block.before, block)
    if front.before is not None:
        front.before.after = front
    block.before = front
    block.address += size
    block.size -= size
    return front


def join(block: Block, other: Block) -> None:
    """A neighbour, which is in no list, becomes part of the block."""
    if block.before is other:
        block.address = other.address
        block.before = other.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = other.after
        if block.after is not None:
            block.after.before = block
    block.size += other.size
