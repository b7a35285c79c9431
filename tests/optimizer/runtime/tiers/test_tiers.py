import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import DiskFull
from optimizer.base.units import MIB
from optimizer.formats.transfer_sizes import STAGING_BYTES, scratch_bytes
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.plan.activations import ActivationsPlan
from optimizer.runtime.device.backends import in_place_of_its_device
from optimizer.runtime.device.cpu import CpuBackend
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.activations import apply_activations
from optimizer.runtime.tiers.compression import Packing
from optimizer.runtime.tiers.host_memory import HostArena
from optimizer.runtime.tiers.opened import OpenStores
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiers.test_disk import largest_file
from tests.optimizer.runtime.tiny import make_spec
from tests.valkey import Valkey

CPU = torch.device("cpu")


def make_arena() -> HostArena:
    return HostArena(CpuBackend(CPU), slab_bytes=4096)


def test_buffers_are_cut_one_after_another_across_slabs() -> None:
    arena = make_arena()
    sizes = [1000, 3000, 10_000, 1, 0]
    buffers = [arena.take(size) for size in sizes]
    assert [sum(piece.numel() for piece in buffer) for buffer in buffers] == sizes
    assert len(buffers[2]) > 1
    assert arena.taken_bytes == 4 * 4096


def test_buffers_do_not_overlap() -> None:
    arena = make_arena()
    buffers = [arena.take(size) for size in (700, 5000, 4096, 300)]
    for index, buffer in enumerate(buffers):
        for piece in buffer:
            piece.fill_(index)
    assert all((piece == index).all() for index, buffer in enumerate(buffers) for piece in buffer)


def test_an_arena_takes_nothing_more_for_sizes_it_had_before() -> None:
    arena = make_arena()
    for _ in range(3):
        buffers = {size: arena.take(size) for size in (100, 9000, 2000)}
        for size, buffer in buffers.items():
            arena.give_back(buffer, size)
    assert arena.taken_bytes == 3 * 4096


def test_the_meter_counts_what_an_arena_takes_as_whole_slabs() -> None:
    meter = Meter(device=CPU)
    with meter, meter.region("activations", tier="host"):
        arena = make_arena()
        arena.take(5000)
    assert meter.host_bytes == arena.taken_bytes == 8192


def test_bytes_come_back_as_they_left() -> None:
    tiers = Tiers(device=CPU)
    source = torch.randn(1000)
    copy = tiers.offload(source.untyped_storage(), category="activations")
    fetched = tiers.fetch(copy, category="activations").wait()
    assert torch.equal(fetched, source.view(torch.uint8))
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"] == 4000


@pytest.mark.parametrize("size", [(30, 20), (800, 400)], ids=["alone", "shared among threads"])
def test_a_whole_that_is_transposed_comes_back_as_it_lay(size: tuple[int, int]) -> None:
    tiers = Tiers(device=CPU)
    whole = torch.randn(size).T
    copies = tiers.plain_copies("activations")
    back = copies.back.copy(copies.out.copy(whole))
    assert torch.equal(back, whole)
    assert back.stride() == whole.stride()
    assert back.data_ptr() != whole.data_ptr()
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"] == whole.nbytes
    assert set(tiers.lanes.take().busy_ms) == {"copy_out", "copy_in"}


@pytest.mark.parametrize("num_elements", [100, 200_000], ids=["alone", "shared among threads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_ranges_of_another_dtype_are_copied_by_their_bytes(tiers: Tiers, num_elements: int, dtype: torch.dtype) -> None:
    source = torch.arange(num_elements, dtype=dtype)
    home = tiers.host_buffer(source.nbytes, dtype=torch.uint8, category="weights")
    tiers.copy_to_host(source, home).finish()
    assert torch.equal(home.view(dtype), source)
    back = torch.empty_like(source)
    tiers.copy_to_device(home, back).wait()
    assert torch.equal(back, source)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    opened = Tiers(device=CPU, meter=Meter(device=CPU), scratch=tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("place", ["host", "disk", "remote"])
@pytest.mark.parametrize("num_elements", [0, 1, 1000, 3_000_001])
def test_bytes_come_back_from_every_place(remote: Valkey, tiers: Tiers, place: str, num_elements: int) -> None:
    source = torch.randn(num_elements)
    copy = tiers.offload(source.untyped_storage(), category="activations", dtype=source.dtype, place=place)
    fetched = tiers.fetch(copy, category="activations").wait()
    assert torch.equal(fetched.view(torch.float32), source)


def test_each_link_of_the_way_counts(remote: Valkey, tiers: Tiers) -> None:
    storage = torch.randn(1000).untyped_storage()
    for place in ("host", "disk", "remote"):
        copy = tiers.offload(storage, category="activations", dtype=torch.float32, place=place, compress="bf16")
        tiers.fetch(copy, category="activations")
    assert tiers.copied_bytes == {
        "device_to_host": 3 * 2000,
        "host_to_device": 3 * 2000,
        "host_to_disk": 2000,
        "disk_to_host": 2000,
        "host_to_remote": 2000,
        "remote_to_host": 2000,
    }


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_a_store_holds_what_is_offloaded_as_long_as_its_copy_lives(remote: Valkey, tiers: Tiers, place: str) -> None:
    copies = [
        tiers.offload(torch.ones(size).untyped_storage(), category="activations", place=place) for size in (10, 20)
    ]
    for copy in copies:
        tiers.fetch(copy, category="activations")
    used = {"disk": lambda: tiers.disk_bytes, "remote": lambda: tiers.remote_bytes}[place]
    assert used() == 120
    copies.pop()
    del copy
    assert used() == 40
    copies.clear()
    assert used() == 0


def test_the_host_holds_only_the_staging_buffers_however_much_passes(tiers: Tiers) -> None:
    with tiers.meter:
        copies = []
        for _ in range(5):
            copies.append(tiers.offload(torch.ones(MIB).untyped_storage(), category="activations", place="disk"))
            assert tiers.meter.host_bytes == STAGING_BYTES
        tiers.prefetch(copies)
        for copy in copies:
            tiers.fetch(copy, category="activations")
        assert tiers.meter.peak().host_bytes == STAGING_BYTES
    assert tiers.disk_peak_bytes == 5 * 4 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_reading_ahead_more_than_fits_or_in_another_order_changes_no_bytes(
    tiers: Tiers, order: tuple[int, ...]
) -> None:
    sources = [torch.randn(MIB + index) for index in range(4)]
    copies = [
        tiers.offload(source.untyped_storage(), category="activations", dtype=source.dtype, place="disk")
        for source in sources
    ]
    tiers.prefetch(copies)
    for index in order:
        fetched = tiers.fetch(copies[index], category="activations").wait()
        assert torch.equal(fetched.view(torch.float32), sources[index])
        tiers.prefetch(copies)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_offloading_reading_ahead_fetching_and_dropping_changes_a_byte(
    remote: Valkey, tiers: Tiers, seed: int
) -> None:
    rng = random.Random(seed)
    held = []
    for _ in range(250):
        action = rng.choice(("offload", "offload", "prefetch", "fetch", "fetch", "drop"))
        if action == "offload":
            source = torch.full((rng.choice((1, 1000, 600_000, 1_200_000)),), rng.random())
            source[:: rng.randint(1, 999)] = rng.random()
            place = rng.choice(("host", "disk", "remote"))
            storage = source.untyped_storage()
            copy = tiers.offload(storage, category="activations", dtype=source.dtype, place=place)
            held.append((source, copy))
        elif held and action == "prefetch":
            tiers.prefetch([copy for _, copy in rng.sample(held, rng.randint(1, len(held)))])
        elif held and action == "fetch":
            source, copy = rng.choice(held)
            fetched = tiers.fetch(copy, category="activations").wait()
            assert torch.equal(fetched.view(torch.float32), source)
            del copy
        elif held:
            held.pop(rng.randrange(len(held)))
    tiers.close()
    assert remote.list_keys() == []


def test_what_was_read_ahead_and_dropped_gives_its_slabs_back(tiers: Tiers) -> None:
    for _ in range(3):
        copies = [
            tiers.offload(torch.ones(MIB).untyped_storage(), category="activations", place="disk") for _ in range(3)
        ]
        tiers.prefetch(copies)
        del copies
    source = torch.randn(4 * MIB)
    copy = tiers.offload(source.untyped_storage(), category="activations", place="disk")
    assert torch.equal(tiers.fetch(copy, category="activations").wait().view(torch.float32), source)


def test_a_host_buffer_counts_on_the_host_as_long_as_it_lives(tiers: Tiers) -> None:
    buffer = tiers.host_buffer((10, 3), dtype=torch.bfloat16, category="gradients")
    assert (buffer.shape, buffer.dtype) == ((10, 3), torch.bfloat16)
    assert tiers.meter.bytes_by_category(tier="host")["gradients"] == 60
    assert tiers.meter.device_bytes == 0
    del buffer
    assert tiers.meter.host_bytes == 0


def test_ranges_are_copied_between_device_and_host_without_autograd_seeing_it(tiers: Tiers) -> None:
    parameter = torch.nn.Parameter(torch.randn(6, 4))
    home = tiers.host_buffer(100, dtype=torch.float32, category="weights")
    version = parameter._version
    tiers.copy_to_host(parameter, home[8:32]).finish()
    assert torch.equal(home[8:32], parameter.detach().view(-1))
    home[8:32] = 2.0
    tiers.copy_to_device(home[8:32], parameter).wait()
    assert bool((parameter == 2).all())
    assert parameter._version == version
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"] == 96


def test_only_contiguous_tensors_are_copied_by_range(tiers: Tiers) -> None:
    home = tiers.host_buffer(24, dtype=torch.float32, category="weights")
    with pytest.raises(ValueError, match=r"strides \(1, 6\)"):
        tiers.copy_to_host(torch.ones(4, 6).T, home)


def test_a_disk_buffer_is_written_and_read_by_ranges_in_the_order_asked_for(tiers: Tiers) -> None:
    buffer = tiers.stored_buffer(4 * 1000, place="disk")
    assert tiers.disk_bytes == buffer.num_bytes == 4000
    expected = torch.zeros(1000)
    for value in range(50):
        chunk = torch.full((300,), float(value))
        start = 13 * value
        buffer.write(chunk, offset_bytes=4 * start)
        expected[start : start + 300] = chunk
    found = torch.empty(937)
    buffer.read(found).wait()
    assert tiers.meter.host_bytes == 0
    assert torch.equal(found, expected[:937])
    assert tiers.copied_bytes["host_to_disk"] == 50 * 1200
    assert tiers.copied_bytes["disk_to_host"] == 937 * 4


def test_reads_and_writes_that_overlap_happen_in_the_order_in_which_they_were_begun(tiers: Tiers) -> None:
    buffer = tiers.stored_buffer(4 * MIB, place="disk")
    found = [torch.empty(MIB) for _ in range(20)]
    transfers = []
    for value, into in enumerate(found):
        transfers.append(buffer.write(torch.full((MIB,), float(value))))
        transfers.append(buffer.read(into))
    for transfer in transfers:
        transfer.wait()
    assert all(bool((into == value).all()) for value, into in enumerate(found))


def test_a_disk_buffer_has_an_end(tiers: Tiers) -> None:
    buffer = tiers.stored_buffer(100, place="disk")
    with pytest.raises(ValueError, match="bytes 80 to 120 of a buffer of 100"):
        buffer.write(torch.ones(10), offset_bytes=80)


def test_device_tensors_are_saved_to_the_disk_and_loaded_through_staging(tiers: Tiers) -> None:
    source = torch.randn(3 * MIB + 1)
    buffer = tiers.stored_buffer(4 * source.nbytes, place="disk")
    for index in range(4):
        tiers.save(source + index, buffer, offset_bytes=index * source.nbytes)
    target = torch.empty_like(source)
    for index in (2, 0, 3):
        tiers.load(buffer, target, offset_bytes=index * source.nbytes).wait()
        assert torch.equal(target, source + index)
    tiers.save(source * 2, buffer)
    tiers.load(buffer, target).wait()
    assert torch.equal(target, source * 2)
    moved_out, moved_in = 5 * source.nbytes, 4 * source.nbytes
    assert (tiers.copied_bytes["device_to_host"], tiers.copied_bytes["host_to_disk"]) == (moved_out, moved_out)
    assert (tiers.copied_bytes["disk_to_host"], tiers.copied_bytes["host_to_device"]) == (moved_in, moved_in)


def test_the_packers_buffers_count_once_and_stay(tiers: Tiers) -> None:
    storage = torch.ones(100_000).untyped_storage()
    with tiers.meter:
        for _ in range(3):
            copy = tiers.offload(storage, category="activations", dtype=torch.float32, compress="int8")
    assert tiers.meter.bytes_by_category()["temporaries"] == scratch_bytes("int8", device_kind="cpu")
    assert tiers.meter.bytes_by_category(tier="host")["activations"] == copy.packing.packed_bytes < 110_000


class Event(str):
    __slots__ = ()

    def synchronize(self) -> None:
        """The copies of this stream are done when they return."""


class Stream:
    """Stands for the two streams of a card where there is none: copies run at once, and what waits for what is noted."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def wait_stream(self, other: "Stream") -> None:
        self.notes.append("copies wait for compute")

    def wait_event(self, event: Event) -> None:
        self.notes.append(f"compute waits for {event}")

    def record_event(self) -> Event:
        self.notes.append("copy")
        return Event(f"copy {self.notes.count('copy')}")

    def synchronize(self) -> None:
        """Do nothing; closing calls it."""


class NotingBackend(CpuBackend):
    """A device with one stream, which is also compute's."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__(CPU)
        self.stream = Stream()

    def make_stream(self) -> Any:
        return self.stream

    def current_stream(self) -> Any:
        return self.stream

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


@pytest.fixture
def stream() -> Iterator[Stream]:
    backend = NotingBackend()
    with in_place_of_its_device(backend):
        yield backend.stream


def make_asynchronous_tiers(stream: Stream, meter: Meter | None = None) -> Tiers:
    tiers = Tiers(device=CPU, meter=meter)
    tiers._arena = make_arena()
    return tiers


def test_what_is_offloaded_stays_until_compute_waits_for_its_copy(stream: Stream) -> None:
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


def test_a_fetched_copy_that_nobody_used_is_waited_for_before_it_goes(stream: Stream) -> None:
    tiers = make_asynchronous_tiers(stream)
    copy = tiers.offload(torch.ones(1000).untyped_storage(), category="activations")
    fetched = tiers.fetch(copy, category="activations")
    assert stream.notes[-1] == "copy"
    del fetched
    assert stream.notes[-1] == "compute waits for copy 2"


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_what_is_fetched_from_a_store_comes_in_the_background_and_is_waited_for(
    remote: Valkey, stream: Stream, place: str
) -> None:
    tiers = make_asynchronous_tiers(stream)
    sources = [torch.randn(MIB + index) for index in range(6)]
    copies = [
        tiers.offload(
            source.untyped_storage(), category="activations", dtype=source.dtype, place=place, compress="bf16"
        )
        for source in sources
    ]
    fetched = [tiers.fetch(copy, category="activations") for copy in reversed(copies)]
    del copies
    for source, copy in zip(reversed(sources), fetched, strict=True):
        arrived = copy.coming.wait()
        assert torch.equal(copy.wait().view(torch.float32), source.bfloat16().float())
        assert f"compute waits for {arrived}" in stream.notes
    tiers.close()


def test_a_store_that_fails_in_the_background_is_named_where_its_bytes_are_used(stream: Stream, tmp_path: Path) -> None:
    tiers = make_asynchronous_tiers(stream)
    tiers._stores = OpenStores(scratch=tmp_path, url=None)
    copy = tiers.offload(torch.ones(MIB).untyped_storage(), category="activations", place="disk")
    tiers.fetch(copy, category="activations").wait()
    del copy
    with largest_file(MIB):
        copy = tiers.offload(torch.ones(MIB).untyped_storage(), category="activations", place="disk")
        with pytest.raises(DiskFull):
            tiers.fetch(copy, category="activations").wait()
    tiers.close()


def test_copies_that_fail_on_their_way_to_the_device_are_named_and_hold_up_no_others(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make_asynchronous_tiers(stream)
    tiers._stores = OpenStores(scratch=tmp_path, url=None)
    copies = [tiers.offload(torch.ones(MIB).untyped_storage(), category="activations", place="disk") for _ in range(12)]

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(Packing, "unpack", fail)
        # More than there are slabs.
        failing = [tiers.fetch(copy, category="activations") for copy in copies]
        errors = [fetched.coming._futures[0].exception(timeout=60) for fetched in failing]
    assert {str(error) for error in errors} == {"CUDA error: an illegal memory access was encountered"}
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", fail)
        failing = [tiers.fetch(copy, category="activations") for copy in copies]
        errors = [fetched.coming._futures[0].exception(timeout=60) for fetched in failing]
        assert all(isinstance(error, RuntimeError) for error in errors[-4:])
    assert bool((tiers.fetch(copies[0], category="activations").wait().view(torch.float32) == 1).all())
    failing.clear()
    tiers.close()


def test_saving_and_loading_beside_compute_keep_to_the_order_they_were_asked_in(stream: Stream, tmp_path: Path) -> None:
    tiers = make_asynchronous_tiers(stream)
    tiers._stores = OpenStores(scratch=tmp_path, url=None)
    buffer = tiers.stored_buffer(4 * 3 * MIB, place="disk")
    source, target = torch.randn(3 * MIB), torch.empty(3 * MIB)
    for value in range(3):
        tiers.save(source + value, buffer)
        tiers.load(buffer, target).wait()
        assert torch.equal(target, source + value)
    tiers.close()


def test_the_sources_of_copies_to_the_host_are_kept_for_a_few_copies_only(stream: Stream) -> None:
    meter = Meter(device=CPU)
    tiers = make_asynchronous_tiers(stream, meter)
    home = torch.empty(1000)
    with meter:
        for value in range(10):
            tiers.copy_to_host(torch.full((1000,), float(value)), home)
        assert meter.device_bytes == 4 * 4000
    assert bool((home == 9).all())


@pytest.mark.parametrize("choice", ["offload", "offload_disk", "offload_remote"])
def test_offloading_beside_compute_gives_the_bits_of_keeping_and_uses_its_buffers_again(
    remote: Valkey, stream: Stream, choice: str
) -> None:
    def gradients(choice: str, steps: int = 3) -> tuple[list[torch.Tensor], list[int], Tiers]:
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
    found, taken, tiers = gradients(choice)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    tiers.close()
    if choice == "offload":
        assert taken[0] == taken[-1] >= tiers.copied_bytes["device_to_host"] / 3
    assert tiers.copied_bytes["device_to_host"] == tiers.copied_bytes["host_to_device"]


def test_at_most_two_offloaded_blocks_are_back_at_once(stream: Stream) -> None:
    model = build_model(make_spec("llama"), seed=3)
    blocks = find_blocks(model)
    tiers = make_asynchronous_tiers(stream)
    apply_activations(blocks, ActivationsPlan(per_block=("offload",) * len(blocks)), tiers)
    loss = model(torch.arange(64).view(2, 32)).logits.square().mean()
    per_block_bytes = tiers.copied_bytes["device_to_host"] // len(blocks)
    fetched_when = []
    norms: list[Any] = [block.input_layernorm for block in blocks]
    for norm in norms:
        norm.weight.register_post_accumulate_grad_hook(
            lambda _: fetched_when.append(tiers.copied_bytes["host_to_device"] // per_block_bytes)
        )
    loss.backward()
    # When a block's backward ends, itself and those after it are back, and the one before it is fetched ahead.
    assert fetched_when == [2, 3, 3]
