import contextlib

import pytest
import torch

from optimizer.models.build import build_model, find_blocks
from optimizer.plan.activations import ActivationsPlan
from optimizer.runtime.activations import apply_activations
from optimizer.runtime.host_memory import HostArena
from optimizer.runtime.meter import Meter
from optimizer.runtime.tiers import Tiers
from tests.optimizer.runtime.tiny import make_spec

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
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"] == 4000


class Stream:
    """Stands for the two streams of a card where there is none: copies run at once, and what waits for what is noted."""

    def __init__(self):
        self.notes = []

    def wait_stream(self, other):
        self.notes.append("copies wait for compute")

    def wait_event(self, event):
        self.notes.append(f"compute waits for {event}")

    def record_event(self):
        self.notes.append("copy")
        return f"copy {self.notes.count('copy')}"


@pytest.fixture
def stream(monkeypatch):
    noted = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: noted)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return noted


def make_asynchronous_tiers(stream, meter=None):
    tiers = Tiers(device=CPU, meter=meter)
    tiers._copy_stream = stream
    tiers._arena = make_arena()
    return tiers


def test_what_is_offloaded_stays_until_compute_waits_for_its_copy(stream):
    meter = Meter(device=CPU)
    tiers = make_asynchronous_tiers(stream, meter)
    with meter:
        copies = []
        for _ in range(3):
            tiers.begin_group()
            copies.append(tiers.offload(torch.ones(1000).untyped_storage(), category="activations"))
        # The first group was let go when the third began.
        assert meter.device_bytes == 2 * 4000
        assert [note for note in stream.notes if note.startswith("compute")] == ["compute waits for copy 1"]
        tiers.settle()
        assert meter.device_bytes == 0
        assert stream.notes[-1] == "compute waits for copy 3"


def test_a_fetched_copy_that_nobody_used_is_waited_for_before_it_goes(stream):
    tiers = make_asynchronous_tiers(stream)
    copy = tiers.offload(torch.ones(1000).untyped_storage(), category="activations")
    fetched = tiers.fetch(copy, category="activations")
    assert stream.notes[-1] == "copy"
    del fetched
    assert stream.notes[-1] == "compute waits for copy 2"


def test_offloading_beside_compute_gives_the_bits_of_keeping_and_uses_its_buffers_again(stream):
    def gradients(choice, steps=3):
        model = build_model(make_spec("gpt2"), seed=3)
        blocks = find_blocks(model)
        tiers = make_asynchronous_tiers(stream)
        undo = apply_activations(blocks, ActivationsPlan(per_block=(choice,) * len(blocks)), tiers)
        taken = []
        for _ in range(steps):
            model.zero_grad()
            torch.manual_seed(0)
            loss = model(torch.arange(64).view(2, 32)).logits.square().mean()
            tiers.settle()
            loss.backward()
            taken.append(tiers._arena.taken_bytes)
        undo()
        return [parameter.grad for parameter in model.parameters()], taken, tiers

    expected, _, _ = gradients("keep")
    found, taken, tiers = gradients("offload")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert taken[0] == taken[-1] >= tiers.copied_bytes["device_to_host"] / 3
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"]


def test_at_most_two_offloaded_blocks_are_back_at_once(stream):
    model = build_model(make_spec("llama"), seed=3)
    blocks = find_blocks(model)
    tiers = make_asynchronous_tiers(stream)
    apply_activations(blocks, ActivationsPlan(per_block=("offload",) * len(blocks)), tiers)
    loss = model(torch.arange(64).view(2, 32)).logits.square().mean()
    per_block_bytes = tiers.copied_bytes["device_to_host"] // len(blocks)
    fetched_when = []
    for block in blocks:
        block.input_layernorm.weight.register_post_accumulate_grad_hook(
            lambda _: fetched_when.append(tiers.copied_bytes["host_to_device"] // per_block_bytes)
        )
    loss.backward()
    # When a block's backward ends, itself and those after it are back, and the one before it is fetched ahead.
    assert fetched_when == [2, 3, 3]
