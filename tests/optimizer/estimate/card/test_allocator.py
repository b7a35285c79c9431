"""The model of torch's allocator: its rules one by one, and against a plain reference on requests drawn at random."""

import random
from typing import Any

import pytest

from optimizer.base.units import MIB
from optimizer.estimate.card.allocator import AllocatorSettings, CachingAllocator, CapReached, replay


def reserve(*sizes: int, **settings: Any) -> CachingAllocator:
    allocator = CachingAllocator(AllocatorSettings(**settings))
    for index, num_bytes in enumerate(sizes):
        allocator.allocate(index, num_bytes)
    return allocator


@pytest.mark.parametrize(
    ("num_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_have_the_sizes_that_torch_gives_them(num_bytes: int, segment_bytes: int) -> None:
    assert reserve(num_bytes).reserved_bytes == segment_bytes


def test_requests_are_rounded_up_to_512_bytes() -> None:
    assert reserve(1, 512, 513).allocated_bytes == 512 + 512 + 1024


def test_nothing_is_allocated_for_no_bytes() -> None:
    allocator = reserve(0)
    allocator.free(0)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_what_is_left_of_a_large_block_is_cut_off_only_above_one_mib() -> None:
    whole = reserve(19 * MIB + 1)
    assert whole.allocated_bytes == 20 * MIB
    cut = reserve(20 * MIB)
    cut.free(0)
    cut.allocate("again", 18 * MIB)
    assert cut.allocated_bytes == 18 * MIB


def test_small_requests_share_a_segment_and_large_ones_do_not_use_it() -> None:
    allocator = reserve(MIB, MIB, 512)
    assert allocator.num_segments == 2
    allocator.allocate("large", 2 * MIB)
    assert allocator.reserved_bytes == (2 + 2 + 20) * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = reserve(32 * MIB, 24 * MIB, 40 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate("fits second", 23 * MIB)
    assert sorted(size for _, size, is_free in allocator.fragments if is_free) == [32 * MIB, 40 * MIB]


def test_free_neighbours_become_one_block() -> None:
    allocator = reserve(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for key in (1, 3, 2, 0):
        allocator.free(key)
    allocator.allocate("whole", 20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_gaps_between_what_stays_are_fragmentation() -> None:
    allocator = reserve(*[12 * MIB] * 10)
    for key in range(0, 10, 2):
        allocator.free(key)
    allocator.allocate("wider than a gap", 24 * MIB)
    found = allocator.result()
    assert found.reserved_peak_bytes == 144 * MIB
    assert found.allocated_peak_bytes == 120 * MIB
    assert found.releasable_bytes == 60 * MIB


def test_at_the_cap_free_segments_are_given_back_and_the_request_is_met() -> None:
    requests = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 50 * MIB)]
    found = replay([requests], settings=AllocatorSettings(cap_bytes=64 * MIB))
    assert (found.num_retries, found.is_over_cap) == (1, False)
    assert found.reserved_peak_bytes == 60 * MIB


def test_a_request_beyond_the_cap_is_not_met() -> None:
    allocator = reserve(30 * MIB, cap_bytes=64 * MIB)
    with pytest.raises(CapReached):
        allocator.allocate("too much", 40 * MIB)
    found = replay([[(1, 30 * MIB), (2, 40 * MIB)]], settings=AllocatorSettings(cap_bytes=64 * MIB))
    assert found.is_over_cap


def test_a_block_that_another_stream_uses_is_not_taken_before_that_is_done() -> None:
    allocator = reserve(30 * MIB)
    allocator.record_stream(0)
    allocator.free(0)
    assert allocator.allocated_bytes == 0
    allocator.allocate("next", 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.finish(0)
    allocator.allocate("after that", 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = reserve(30 * MIB)
    allocator.free(0)
    allocator.allocate("side", 30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB


def test_blocks_above_the_largest_that_is_split_serve_only_requests_of_nearly_their_size() -> None:
    allocator = reserve(100 * MIB, max_split_bytes=50 * MIB)
    allocator.free(0)
    allocator.allocate("small", 12 * MIB)
    assert allocator.reserved_bytes == 112 * MIB
    allocator.allocate("near", 90 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (112 * MIB, 112 * MIB)


def test_at_the_cap_oversized_blocks_go_back_first() -> None:
    allocator = reserve(100 * MIB, 20 * MIB, max_split_bytes=50 * MIB, cap_bytes=160 * MIB)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate("next", 60 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.num_retries == 0


@pytest.mark.parametrize(
    ("num_bytes", "divisions", "rounded"),
    [(5000, 4, 5120), (9 * 1024, 2, 12 * 1024), (8192, 4, 8192), (1200, 4, 1536)],
)
def test_requests_are_rounded_to_steps_between_powers_of_two(num_bytes: int, divisions: int, rounded: int) -> None:
    """Small ones, of up to 512 bytes a division, to 512 bytes as ever."""
    assert reserve(num_bytes, roundup_power2_divisions=divisions).allocated_bytes == rounded


def test_garbage_is_collected_from_what_was_unused_for_long() -> None:
    allocator = reserve(40 * MIB, 40 * MIB, cap_bytes=200 * MIB, garbage_collection_threshold=0.3)
    allocator.free(0)
    allocator.allocate("larger", 60 * MIB)
    assert allocator.reserved_bytes == 100 * MIB
    assert allocator.num_retries == 0


def test_a_segment_that_grows_has_no_gap_between_what_came_before_and_after() -> None:
    sizes = [12 * MIB, 15 * MIB, 30 * MIB]
    plain, grown = reserve(*sizes), reserve(*sizes, expandable_segments=True)
    for allocator in (plain, grown):
        for key in range(3):
            allocator.free(key)
        allocator.allocate("all", 57 * MIB)
    assert plain.reserved_bytes == (12 + 16 + 30 + 58) * MIB
    assert grown.reserved_bytes == 60 * MIB


def test_a_segment_that_grows_gives_whole_pages_back() -> None:
    allocator = reserve(30 * MIB, 30 * MIB, 30 * MIB, expandable_segments=True)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(1)
    allocator.empty_cache()
    # The hole from 30 to 60 MiB holds one whole page of 20, and the rest behind 90 none.
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate("again", 30 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


class PlainAllocator:
    """The rules for torch's default settings, by search through lists: slow, and nothing in common with what is tested."""

    def __init__(self) -> None:
        self.segments: list[Any] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(size for segment in self.segments for _, size in segment["blocks"])

    @property
    def allocated_bytes(self) -> int:
        return sum(size for segment in self.segments for key, size in segment["blocks"] if key is not None)

    def allocate(self, key: int, num_bytes: int) -> None:
        size = (num_bytes + 511) // 512 * 512
        is_small = size <= 2**20
        fitting = [
            (block[1], index, place)
            for index, segment in enumerate(self.segments)
            if segment["is_small"] == is_small
            for place, block in enumerate(segment["blocks"])
            if block[0] is None and block[1] >= size
        ]
        if not fitting:
            length = 2**21 if is_small else 20 * 2**20 if size < 10 * 2**20 else (size + 2**21 - 1) // 2**21 * 2**21
            self.segments.append({"is_small": is_small, "blocks": [(None, length)]})
            fitting = [(length, len(self.segments) - 1, 0)]
        found, index, place = min(fitting)
        rest = found - size
        is_cut = rest >= 512 if is_small else rest > 2**20
        blocks = self.segments[index]["blocks"]
        blocks[place : place + 1] = [(key, size), (None, rest)] if is_cut else [(key, found)]

    def free(self, key: int) -> None:
        for segment in self.segments:
            joined: list[Any] = []
            for owner, size in segment["blocks"]:
                owner = None if owner == key else owner
                if joined and owner is None and joined[-1][0] is None:
                    size += joined.pop()[1]
                joined.append((owner, size))
            segment["blocks"] = joined


def draw_requests(seed: int, count: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    live, requests = [], []
    for key in range(count):
        limit = rng.choice([2**10, 2**18, 2**20, 2**22, 2**24, 2**26])
        requests.append((key, rng.randint(1, limit)))
        live.append(key)
        while live and rng.random() < 0.48:
            requests.append((live.pop(rng.randrange(len(live))), 0))
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_it_does_what_a_plain_reference_does(seed: int) -> None:
    fast, plain = CachingAllocator(), PlainAllocator()
    for key, num_bytes in draw_requests(seed, 300):
        for allocator in (fast, plain):
            if num_bytes:
                allocator.allocate(key, num_bytes)
            else:
                allocator.free(key)
        assert (fast.reserved_bytes, fast.allocated_bytes) == (plain.reserved_bytes, plain.allocated_bytes)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expandable_segments": True},
        {"max_split_bytes": 8 * MIB},
        {"roundup_power2_divisions": 4},
        {"cap_bytes": 600 * MIB},
        {"cap_bytes": 600 * MIB, "expandable_segments": True},
        {"cap_bytes": 600 * MIB, "garbage_collection_threshold": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_never_overlap_and_no_byte_is_lost(settings: dict[str, Any], seed: int) -> None:
    allocator = CachingAllocator(AllocatorSettings(**settings))
    cap_bytes = settings.get("cap_bytes", 2**60)
    for index, (key, num_bytes) in enumerate(draw_requests(seed, 200)):
        if num_bytes:
            try:
                allocator.allocate(key, num_bytes)
            except CapReached:
                continue
        else:
            allocator.free(key)
        assert allocator.allocated_bytes <= allocator.reserved_bytes < cap_bytes + 20 * MIB
        if index % 8:
            continue
        fragments = sorted(allocator.fragments)
        assert sum(size for _, size, _ in fragments) == allocator.reserved_bytes
        assert sum(size for _, size, is_free in fragments if not is_free) == allocator.allocated_bytes
        end = 0
        for address, size, _ in fragments:
            assert address >= end
            end = address + size
    allocator.empty_cache()
    assert allocator.result().reserved_peak_bytes >= allocator.reserved_bytes


def test_all_comes_back_when_all_is_freed() -> None:
    allocator = CachingAllocator()
    live = set()
    for key, num_bytes in draw_requests(9, 200):
        (allocator.allocate(key, num_bytes), live.add(key)) if num_bytes else (allocator.free(key), live.discard(key))
    for key in live:
        allocator.free(key)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.num_segments) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_it_reserves_what_torch_does_on_a_card(seed: int) -> None:
    import torch

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    model, live = CachingAllocator(), {}
    for key, num_bytes in draw_requests(seed, 300):
        if num_bytes:
            live[key] = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            model.allocate(key, num_bytes)
        else:
            del live[key]
            model.free(key)
        found = torch.cuda.memory_reserved() - before[0], torch.cuda.memory_allocated() - before[1]
        assert found == (model.reserved_bytes, model.allocated_bytes)
