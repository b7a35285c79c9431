"""A model of torch's CUDA caching allocator: what it reserves, and how much of that is gaps, for requests in order. Torch-free.

Rules and constants are those of torch 2.11 to 2.13 (``c10/core/AllocatorConfig.h``, ``c10/cuda/CUDACachingAllocator.cpp``):
requests are rounded up to 512 bytes; up to 1 MiB they are cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB,
above that a segment is the request rounded up to 2 MiB. The smallest free block that is large enough is taken, at equal size the
lowest address; what is left of it stays free as a block of its own where it is worth it. Free neighbours of one segment become
one block again. At the cap, segments that are wholly free go back and the request is tried once more.

Assumed: the system gives each new segment a higher address than the one before. *Not modelled*: pools of CUDA graphs, memory
that other processes take, a system that refuses although there is room.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from optimizer.base.units import MIB
from optimizer.estimate.card.allocator_blocks import ADDRESS_BITS, Block, Pool
from optimizer.estimate.card.allocator_growth import (
    ADDRESS_SPACE_BYTES,
    find_start,
    map_pages,
    open_segment,
    unmap_pages,
)

MIN_BLOCK_BYTES: Final = 512
SMALL_REQUEST_BYTES: Final = MIB
"""The largest that is cut from a small segment."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MIN_OWN_SEGMENT_BYTES: Final = 10 * MIB
"""The smallest request for which a segment of its own is made."""
SEGMENT_ROUNDING_BYTES: Final = 2 * MIB

Request = tuple[int, int]
"""The number of a storage, and its bytes when it comes; 0 when it goes."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of ``PYTORCH_ALLOC_CONF``, in bytes; the defaults are torch's."""

    expandable_segments: bool = False
    """One segment for each pool and stream, which grows by whole pages."""
    max_split_bytes: int | None = None
    """Blocks of this size and above are never cut, and serve only requests of nearly their size; None cuts all."""
    max_non_split_rounding_bytes: int = 20 * MIB
    """Bytes by which an uncut block may be larger than the request."""
    roundup_power2_divisions: int = 1
    """Requests are rounded up to the next of so many steps between powers of two; 1 rounds to 512 bytes only."""
    garbage_collection_threshold: float = 0.0
    """Share of the cap above which free segments that were not used for long are given back; 0 never does."""
    large_segment_bytes: int = 20 * MIB
    """Size of segments from which requests of 1 to 10 MiB are cut, and by which expandable segments grow."""
    cap_bytes: int | None = None
    """Most that may be reserved: the card's memory, or what ``set_per_process_memory_fraction`` allows."""


class CapReached(Exception):
    """A request finds no room under the cap, not even after all free segments were given back."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"no room for {requested_bytes} bytes")
        self.requested_bytes = requested_bytes


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The allocator's answer to a run of requests."""

    allocated_peak_bytes: int
    """The peak that ``max_memory_allocated`` counts: whole blocks, with what was not worth cutting off."""
    reserved_peak_bytes: int
    """The peak that ``max_memory_reserved`` counts."""
    releasable_bytes: int
    """The part of the reserved bytes at their peak that is in segments that were wholly free, which a retry at the cap
    would give back."""
    num_segments: int
    """Segments at the end; those that grow count once."""
    num_retries: int
    """Requests that were met only after free segments were given back."""
    is_over_cap: bool
    """Some request was not met at all; the peaks are those until then."""

    @property
    def fragmentation(self) -> float:
        """Share of what is reserved at the most that is not allocated at the most."""
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes if self.reserved_peak_bytes else 0.0


def replay(phases: Iterable[Iterable[Request]], *, settings: AllocatorSettings | None = None) -> Replay:
    """Requests in order, in phases: loading, a first step, a second. Peaks are those of the last phase."""
    allocator = CachingAllocator(settings)
    is_over_cap = False
    try:
        for phase in phases:
            allocator.reset_peak()
            allocator.run(phase)
    except CapReached:
        is_over_cap = True
    return allocator.result(is_over_cap=is_over_cap)


class CachingAllocator:
    """Takes requests one after the other. Streams are numbered; 0 is that of compute."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self._settings = settings or AllocatorSettings()
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._held: dict[Hashable, Block] = {}
        self._waiting: dict[Hashable, Block] = {}
        """Freed by their owner while another stream still used them."""
        self._next_address = 0
        self.num_segments = 0
        self.num_retries = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        self.allocated_peak_bytes = self.allocated_bytes
        self.reserved_peak_bytes = self.reserved_bytes
        self.releasable_bytes = self._count_releasable()

    def result(self, *, is_over_cap: bool = False) -> Replay:
        return Replay(
            allocated_peak_bytes=self.allocated_peak_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            releasable_bytes=self.releasable_bytes,
            num_segments=self.num_segments,
            num_retries=self.num_retries,
            is_over_cap=is_over_cap,
        )

    def run(self, requests: Iterable[Request]) -> None:
        """Run all requests on compute's stream. Raises CapReached."""
        allocate, free = self.allocate, self.free
        for key, num_bytes in requests:
            if num_bytes:
                allocate(key, num_bytes)
            else:
                free(key)

    def allocate(self, key: Hashable, num_bytes: int, *, stream: int = 0) -> None:
        """Find room for a storage. key: names the storage until it is freed. Raises CapReached."""
        if num_bytes <= 0:
            return
        size = self._round(num_bytes)
        pool = self._pool(size <= SMALL_REQUEST_BYTES, stream)
        block = self._find(pool, size)
        if block is None:
            block = self._make(pool, size)
        if self._is_cut(pool, block, size):
            block = pool.cut(block, size)
        block.is_free = False
        self._held[key] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes

    def record_stream(self, key: Hashable) -> None:
        """Another stream uses the storage: once freed its block stays out of use until ``finish``."""
        self._held[key].num_uses += 1

    def free(self, key: Hashable) -> None:
        """Free a storage; nothing happens to one without bytes."""
        block = self._held.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        if block.num_uses:
            self._waiting[key] = block
        else:
            block.pool.put_back(block)

    def finish(self, key: Hashable) -> None:
        """The other stream was seen to be done with a storage."""
        block = self._waiting.pop(key, None)
        if block is None:
            self._held[key].num_uses -= 1
            return
        block.num_uses = 0
        block.pool.put_back(block)

    def empty_cache(self) -> None:
        """Give back what is wholly free."""
        for key in list(self._waiting):
            self.finish(key)
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.unmapped and block.address >= pool.base_address:
                    self.reserved_bytes -= unmap_pages(pool, block, page_bytes=self._page_bytes(pool))
                elif block.is_whole:
                    self._release(pool, block)

    @property
    def fragments(self) -> Iterator[tuple[int, int, bool]]:
        """Address, size and whether it is free, of every block with memory behind it; for tests of what must always hold."""
        seen: set[int] = set()
        starts = [*self._held.values(), *self._waiting.values()]
        starts += [block for pool in self._pools.values() for block in pool.blocks.values()]
        for block in starts:
            if id(block) not in seen:
                seen.add(id(block))
                yield block.address, block.size, block.is_free

    # Finding and making blocks.

    def _round(self, num_bytes: int) -> int:
        divisions = self._settings.roundup_power2_divisions
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            if num_bytes & (num_bytes - 1) == 0:
                return num_bytes
            step = (1 << num_bytes.bit_length() - 1) // divisions
            return -(-num_bytes // step) * step
        return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def _pool(self, is_small: bool, stream: int) -> Pool:  # noqa: FBT001
        pool = self._pools.get((is_small, stream))
        if pool is None:
            cuts_above = MIN_BLOCK_BYTES - 1
            if not is_small and not self._settings.expandable_segments:
                cuts_above = SMALL_REQUEST_BYTES
            pool = self._pools[is_small, stream] = Pool(is_small=is_small, cuts_above=cuts_above)
        return pool

    def _find(self, pool: Pool, size: int) -> Block | None:
        pool.num_searches += 1
        ranks = pool.ranks
        index = bisect_left(ranks, size << ADDRESS_BITS)
        if index == len(ranks):
            return None
        block = pool.blocks[ranks[index]]
        if pool.unmapped:
            # What could still grow counts as large as it could grow, and is taken last.
            while block.after is not None and not block.after.is_mapped and index + 1 < len(ranks):
                index += 1
                block = pool.blocks[ranks[index]]
        limit = self._settings.max_split_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self._settings.max_non_split_rounding_bytes:
                return None
        del pool.blocks[ranks.pop(index)]
        return block

    def _is_cut(self, pool: Pool, block: Block, size: int) -> bool:
        if block.size - size <= pool.cuts_above:
            return False
        limit = self._settings.max_split_bytes
        return limit is None or size < limit or pool.is_small or self._settings.expandable_segments

    def _make(self, pool: Pool, size: int) -> Block:
        settings = self._settings
        if settings.cap_bytes is not None and settings.garbage_collection_threshold > 0:
            self._collect_garbage(settings.cap_bytes)
        segment_bytes = self._segment_bytes(size)
        if not self._has_room(segment_bytes) and not (
            self._release_oversized(pool, size) and self._has_room(segment_bytes)
        ):
            self.num_retries += 1
            self.empty_cache()
            if not self._has_room(segment_bytes):
                raise CapReached(segment_bytes)
        if settings.expandable_segments:
            return self._grow(pool, size)
        self._reserve(segment_bytes)
        self.num_segments += 1
        block = Block(segment_bytes, self._next_address, pool)
        self._next_address += segment_bytes
        return block

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL_REQUEST_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_OWN_SEGMENT_BYTES:
            return self._settings.large_segment_bytes
        return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES

    def _has_room(self, segment_bytes: int) -> bool:
        cap_bytes = self._settings.cap_bytes
        return cap_bytes is None or self.reserved_bytes + segment_bytes <= cap_bytes

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        if self.reserved_bytes > self.reserved_peak_bytes:
            self.reserved_peak_bytes = self.reserved_bytes
            self.releasable_bytes = self._count_releasable()

    def _count_releasable(self) -> int:
        return sum(
            block.size
            for pool in self._pools.values()
            for block in pool.blocks.values()
            if block.is_whole or (pool.unmapped and block.address >= pool.base_address)
        )

    # Giving segments back.

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        self.reserved_bytes -= block.size
        self.num_segments -= 1

    def _release_oversized(self, pool: Pool, size: int) -> bool:
        """Give back free segments for a request, only where blocks are not cut: one that is large enough, else as many
        of the largest as make up for it.
        """
        limit = self._settings.max_split_bytes
        if limit is None or self._settings.expandable_segments:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.ranks, wanted << ADDRESS_BITS)
        if index < len(pool.ranks):
            self._release(pool, pool.blocks[pool.ranks[index]])
            return True
        released_bytes = 0
        while pool.ranks and released_bytes < wanted:
            block = pool.blocks[pool.ranks[-1]]
            if block.size < limit:
                break
            released_bytes += block.size
            self._release(pool, block)
        return released_bytes >= wanted

    def _collect_garbage(self, cap_bytes: int) -> None:
        """Give back free segments of the large pool that were unused for longer than average, until enough came back."""
        target_bytes = self.reserved_bytes - int(self._settings.garbage_collection_threshold * cap_bytes)
        freeable = [
            (pool, block)
            for pool in self._pools.values()
            if not pool.is_small and not pool.unmapped
            for block in pool.blocks.values()
            if block.is_whole
        ]
        while target_bytes > 0 and freeable:
            ages = [pool.num_searches - block.born_at for pool, block in freeable]
            average = sum(ages) / len(ages)
            old = [pair for pair, age in zip(freeable, ages, strict=True) if age >= average]
            freeable = [pair for pair, age in zip(freeable, ages, strict=True) if age < average]
            for pool, block in old:
                target_bytes -= block.size
                self._release(pool, block)

    # Segments that grow.

    def _grow(self, pool: Pool, size: int) -> Block:
        if not pool.unmapped:
            self._next_address += ADDRESS_SPACE_BYTES
            open_segment(pool, self._next_address)
            self.num_segments += 1
        start = find_start(pool, size)
        while not start.is_mapped or start.size < size:
            hole, missing_bytes = start, size
            if start.is_mapped and start.after is not None:
                hole, missing_bytes = start.after, size - start.size
            self._reserve(map_pages(pool, hole, min(hole.size, missing_bytes), page_bytes=self._page_bytes(pool)))
            start = hole
        pool.remove(start)
        return start

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self._settings.large_segment_bytes
