import torch

from optimizer.runtime.meter import Meter
from optimizer.runtime.tiers import HostArena, Tiers

CPU = torch.device("cpu")


def make_arena():
    return HostArena(slab_bytes=4096, pinned=False)


def test_buffers_are_cut_one_after_another_across_slabs():
    arena = make_arena()
    sizes = [1000, 3000, 10_000, 1, 0]
    buffers = [arena.take(size) for size in sizes]
    assert [sum(piece.numel() for piece in buffer) for buffer in buffers] == sizes
    assert len(buffers[2]) > 1
    assert arena.taken_bytes == 4 * 4096


def test_buffers_do_not_overlap():
    arena = make_arena()
    buffers = [arena.take(size) for size in (700, 5000, 4096, 300)]
    for index, buffer in enumerate(buffers):
        for piece in buffer:
            piece.fill_(index)
    assert all((piece == index).all() for index, buffer in enumerate(buffers) for piece in buffer)


def test_an_arena_takes_nothing_more_for_sizes_it_had_before():
    arena = make_arena()
    for _ in range(3):
        buffers = {size: arena.take(size) for size in (100, 9000, 2000)}
        for size, buffer in buffers.items():
            arena.give_back(buffer, size)
    assert arena.taken_bytes == 3 * 4096


def test_the_meter_counts_what_an_arena_takes_as_whole_slabs():
    meter = Meter(device=CPU)
    with meter, meter.region("activations", tier="host"):
        arena = make_arena()
        arena.take(5000)
    assert meter.host_bytes == arena.taken_bytes == 8192


def test_bytes_come_back_as_they_left():
    tiers = Tiers(device=CPU)
    source = torch.randn(1000)
    copy = tiers.offload(source.untyped_storage(), category="activations")
    fetched = tiers.fetch(copy, category="activations").wait()
    assert torch.equal(fetched, source.view(torch.uint8))
    assert (tiers.to_host_bytes, tiers.to_device_bytes) == (4000, 4000)
