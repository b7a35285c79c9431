"""Segments that grow by whole pages, in the allocator's model (``expandable_segments``). Torch-free."""

from bisect import insort
from typing import Final

from optimizer.estimate.card.allocator_blocks import Block, Pool, cut_front, join

ADDRESS_SPACE_BYTES: Final = 1 << 50
"""Address space of one segment."""


def open_segment(pool: Pool, address: int) -> None:
    """Reserve a segment's addresses, without memory yet."""
    pool.base_address = address
    pool.unmapped.append(Block(ADDRESS_SPACE_BYTES, address, pool, is_mapped=False))


def find_start(pool: Pool, size: int) -> Block:
    """Find the block at the lowest address where so much fits behind or in what has no memory yet; a free block before
    it is used.
    """
    for hole in pool.unmapped:
        before = hole.before
        start = before if before is not None and before.is_free and before.is_mapped else hole
        if _free_stretch(start, size) >= size:
            break
    return start


def map_pages(pool: Pool, hole: Block, num_bytes: int, *, page_bytes: int) -> int:
    """Put memory, in whole pages, behind the front of a hole, which becomes a free block; how much."""
    mapped_bytes = min(hole.size, -(-num_bytes // page_bytes) * page_bytes)
    pool.unmapped.remove(hole)
    if mapped_bytes < hole.size:
        rest = Block(hole.size - mapped_bytes, hole.address + mapped_bytes, pool, hole, hole.after, is_mapped=False)
        if rest.after is not None:
            rest.after.before = rest
        hole.after = rest
        hole.size = mapped_bytes
        insort(pool.unmapped, rest, key=_address_of)
    hole.is_mapped = True
    pool.put_back(hole)
    return mapped_bytes


def unmap_pages(pool: Pool, block: Block, *, page_bytes: int) -> int:
    """Take the memory from the whole pages of a free block; how much."""
    offset = block.address - pool.base_address
    start = -(-offset // page_bytes) * page_bytes
    end = (offset + block.size) // page_bytes * page_bytes
    if end <= start:
        return 0
    pool.remove(block)
    front_bytes, rest_bytes = start - offset, offset + block.size - end
    if front_bytes:
        pool.add(cut_front(block, front_bytes))
    if rest_bytes:
        rest = Block(rest_bytes, pool.base_address + end, pool, block, block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        pool.add(rest)
    block.address, block.size = pool.base_address + start, end - start
    block.is_mapped = False
    unmapped_bytes = block.size
    for other in (block.before, block.after):
        if other is not None and not other.is_mapped:
            pool.unmapped.remove(other)
            join(block, other)
    insort(pool.unmapped, block, key=_address_of)
    return unmapped_bytes


def _free_stretch(block: Block | None, wanted_bytes: int) -> int:
    """Bytes from a block on that are free or without memory, as far as it matters."""
    num_bytes = 0
    while num_bytes < wanted_bytes and block is not None and block.is_free:
        num_bytes += block.size
        block = block.after
    return num_bytes


def _address_of(block: Block) -> int:
    return block.address
