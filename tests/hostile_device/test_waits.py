"""Waits of which bits are no witness: they are for times, for memory and for errors."""

import contextlib
import gc
import threading
import time
import types
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan, KvPlace
from optimizer.plan.weights import WeightsPlace, WeightsPlan
from optimizer.runtime.generation import generator
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import forward, step
from optimizer.runtime.step.logits_and_loss import compute_loss
from optimizer.runtime.step.micro_batch import MicroBatch
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.disk import DiskStore
from optimizer.runtime.tiers.shared_memory import SharedMemory
from optimizer.runtime.tiers.tiers import Tiers
from tests.hostile_device.backend import HostileBackend, hostile_device
from tests.hostile_device.cases import SMALL_PIECE_ELEMENTS, generate, train_tiny
from tests.hostile_device.races import COMPUTE, HOST
from tests.hostile_device.streams import Schedule
from tests.hostile_device.trips import SIZE
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.generation.plans import build, prompts_of
from tests.optimizer.runtime.states import make_trainer, read
from tests.optimizer.runtime.step.test_step import PLACES
from tests.optimizer.runtime.tiny import make_plan, make_spec

CPU = torch.device("cpu")


def has_waited(backend: HostileBackend) -> bool:
    """Report whether the host has waited for all that compute was given."""
    clocks = backend.queues.races.clocks
    return clocks[HOST].get(COMPUTE, 0) == clocks[COMPUTE][COMPUTE]


class Clock(types.SimpleNamespace):
    """In place of ``time``: notes at each look whether the host had waited."""

    def __init__(self, backend: HostileBackend) -> None:
        super().__init__()
        self._backend = backend
        self.looks: list[bool] = []

    def perf_counter(self) -> float:
        self.looks.append(has_waited(self._backend))
        return float(len(self.looks))


def test_a_step_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile_device() as backend:
        trainer = make_trainer(plan=make_plan("offload"))
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        clock = Clock(backend)
        monkeypatch.setattr(step, "time", clock)
        trainer.step(batches, learning_rate=1e-3)
        assert len(clock.looks) == 2
        assert clock.looks[1]
        trainer.close()


def test_what_blocks_have_offloaded_is_off_the_device_before_the_head_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_bytes_at_head() -> list[int]:
        trainer = make_trainer(plan=make_plan("offload", accumulation_steps=2))
        assert trainer.meter is not None
        meter, seen = trainer.meter, []

        def look(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(meter.bytes_by_category()["activations"])
            return compute_loss(*args, **kwargs)

        monkeypatch.setattr(forward, "compute_loss", look)
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        trainer.step(batches, learning_rate=1e-3)
        trainer.close()
        return seen

    # The CPU device's copies are done at once.
    expected = list_bytes_at_head()
    with hostile_device():
        assert list_bytes_at_head() == expected
    assert len(expected) == 2


def test_prefill_and_decode_are_timed_to_their_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hostile_device() as backend:
        clock = Clock(backend)
        monkeypatch.setattr(generator, "time", clock)
        generate(SMALL_CONFIGS["llama"], GenerationPlan(batch_size=4), tmp_path)
        # Of each of two passes the begin, the end of its prefill, and the end.
        assert clock.looks[1::3] == clock.looks[2::3] == [True, True]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_weights_that_an_error_leaves_unused_have_come_before_their_memory_goes(tmp_path: Path, place: WeightsPlace) -> None:
    def fail(module: Any, args: Any) -> Never:
        raise RuntimeError("no more")

    model = build(SMALL_CONFIGS["llama"])
    plan = GenerationPlan(batch_size=2, weights=WeightsPlan(place=place, prefetch=1))
    with hostile_device():
        streamed = generator.Generator(model, plan=plan, device=CPU, scratch=tmp_path)
        # The next block's are on their way by then.
        find_blocks(model)[0].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no more"):
            streamed.generate(prompts_of(9), num_new_tokens=2)
        streamed.close()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_records_that_an_error_leaves_unused_have_come_before_their_memory_goes(tmp_path: Path, place: KvPlace) -> None:
    calls: list[int] = []

    def fail_in_decode(module: Any, args: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no more")

    model = build(SMALL_CONFIGS["llama"])
    plan = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place=place, prefetch=1))
    with hostile_device():
        cached = generator.Generator(model, plan=plan, device=CPU, scratch=tmp_path)
        # The next block's are on their way by then.
        find_blocks(model)[0].register_forward_hook(fail_in_decode)
        with contextlib.suppress(RuntimeError):
            cached.generate(prompts_of(9, num_sequences=2), num_new_tokens=3)
        gc.collect()
        cached.close()
    assert len(calls) == 2


def test_records_that_leave_last_hold_no_memory_of_the_device_after_their_pass() -> None:
    model, meter = build(SMALL_CONFIGS["llama"]), Meter(device=CPU)
    plan = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place="host", prefetch=1))
    with hostile_device():
        cached = generator.Generator(model, plan=plan, device=CPU, meter=meter)
        before_bytes = meter.device_bytes
        cached.generate(prompts_of(9, num_sequences=2), num_new_tokens=3)
        assert meter.device_bytes == before_bytes
        cached.close()


def test_a_timeline_is_in_the_devices_time() -> None:
    with hostile_device() as backend:
        meter = Meter(device=CPU)
        torch.ones(3).add_(1)
        meter.mark("forward")
        assert not has_waited(backend)
        meter.start_timeline()
        meter.mark("backward")
        assert has_waited(backend)


@pytest.mark.parametrize("places", ["all on the host", "all on the disk", "state on the host"])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_closing_waits_for_the_updates_of_the_last_step(tmp_path: Path, places: str, max_grad_norm: float | None) -> None:
    def train() -> dict[str, torch.Tensor]:
        trainer = make_trainer(plan=make_plan(**PLACES[places]), scratch=tmp_path, max_grad_norm=max_grad_norm)
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        for _ in range(2):
            trainer.step(batches, learning_rate=1e-2)
        trainer.close()
        return dict(trainer.model.named_parameters())

    expected = train()
    with hostile_device():
        found = {name: parameter.detach().clone() for name, parameter in train().items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_copies_from_a_home_have_ended_before_another_process_may_write_to_it(schedule: Schedule) -> None:
    """The home is shared memory, and the host itself stands in for the other process, which knows of no stream."""
    with hostile_device(schedule=schedule) as backend:
        tiers, memory = Tiers(device=CPU), SharedMemory.make(4096)
        tiers.adopt(memory, counted_bytes=0)
        memory.close_file()
        home = memory.piece(512, 1024)
        backend.register(home)  # by address it is already; the hostile device goes by storages
        home.fill_(1)
        target = torch.empty(1024, dtype=torch.uint8)
        copy = tiers.copy_to_device(home, target)
        tiers.finish_copies()
        home.fill_(2)
        copy.wait()
        assert int(target.sum()) == 1024
        tiers.close()


def make_updated(scratch: Path) -> tuple[Trainer, list[MicroBatch]]:
    """A trainer with its state on the disk, after a step, and micro-batches for more."""
    plan = make_plan(gradients="host", state_place="disk")
    trainer = make_trainer(plan=plan, scratch=scratch, max_grad_norm=1.0)
    batches = make_synthetic_batches(trainer.model, plan=plan, workload=trainer.workload)
    trainer.step(batches, learning_rate=1e-3)
    trainer.join()
    return trainer, batches


def test_an_error_of_an_update_is_raised_at_the_latest_as_the_run_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is gone")

    with hostile_device():
        trainer, batches = make_updated(tmp_path)
        monkeypatch.setattr("optimizer.runtime.tiers.disk.DiskStore.read", fail)
        trainer.step(batches, learning_rate=1e-3)
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.close()


def test_the_last_write_of_an_update_is_waited_for_by_who_joins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Masters once as they come to be, then masters and two moments in each step; every tensor is one piece.
    num_writes = len(list(build_model(make_spec()).parameters())) * (1 + 2 * 3)
    written: list[int] = []
    write = DiskStore.write

    def fail_the_last(store: DiskStore, *args: Any, **kwargs: Any) -> None:
        written.append(1)
        if len(written) == num_writes:
            raise OSError("the disk is gone")
        write(store, *args, **kwargs)

    monkeypatch.setattr(DiskStore, "write", fail_the_last)
    with hostile_device():
        trainer, batches = make_updated(tmp_path)
        trainer.step(batches, learning_rate=1e-3)
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.join()
        assert len(written) == num_writes
        trainer.close(keep_weights=False)


def _read_all(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: read(held) for name, held in trainer.named_weights().items()}


def _read_each(trainer: Trainer) -> dict[str, torch.Tensor]:
    names = [name for name, _ in trainer.model.named_parameters()]
    return {name: trainer.read_weight(name).clone() for name in reversed(names)}


def _list_all(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: read(held) for name, held in trainer.list_held().items()}


def _set_and_read(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.set_weights({name: torch.ones(parameter.shape) for name, parameter in trainer.model.named_parameters()})
    return _read_all(trainer)


@pytest.mark.parametrize("places", ["state on the host", "all on the host"])
@pytest.mark.parametrize("see", [_read_all, _read_each, _list_all, _set_and_read])
def test_weights_are_read_and_replaced_after_the_updates_under_way(tmp_path: Path, places: str, see: Any) -> None:
    def train() -> dict[str, torch.Tensor]:
        trainer = make_trainer(plan=make_plan(**PLACES[places]), scratch=tmp_path, max_grad_norm=1.0)
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
        trainer.step(batches, learning_rate=1e-2)
        seen: dict[str, torch.Tensor] = see(trainer)
        trainer.close()
        return seen

    expected = train()
    with hostile_device():
        found = train()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_on_their_way_to_a_store_are_written_before_their_buffer_is_used_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = DiskStore.write

    def write_pieces_of_weights_late(store: DiskStore, place: Any, data: memoryview, *, offset: int) -> None:
        if len(data) == 2 * SMALL_PIECE_ELEMENTS:
            time.sleep(0.02)
        write(store, place, data, offset=offset)

    plan = make_plan(dtype="bf16", **PLACES["all on the disk"])
    expected = train_tiny("llama", plan, tmp_path, pieces=True)
    monkeypatch.setattr(DiskStore, "write", write_pieces_of_weights_late)
    with hostile_device(schedule="early"):
        assert train_tiny("llama", plan, tmp_path, pieces=True) == expected


def _release_a_buffer(tiers: Tiers) -> None:
    buffer = tiers.stored_buffer(4 * SIZE, place="disk")
    tiers.save(torch.full((SIZE,), 3.0), buffer)
    buffer.release()


def _drop_a_copy(tiers: Tiers) -> None:
    source = torch.full((SIZE,), 3.0)
    tiers.offload(source.untyped_storage(), category="activations", place="disk")


@pytest.mark.parametrize("give_back", [_release_a_buffer, _drop_a_copy])
def test_room_in_a_store_is_handed_out_again_only_after_its_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, give_back: Any
) -> None:
    write = DiskStore.write
    may_go, has_begun, is_done = threading.Event(), threading.Event(), threading.Event()

    def write_the_first_late(store: DiskStore, place: Any, data: memoryview, *, offset: int) -> None:
        is_first = not has_begun.is_set()
        has_begun.set()
        if is_first:
            may_go.wait(0.1)
        write(store, place, data, offset=offset)
        if is_first:
            is_done.set()

    monkeypatch.setattr(DiskStore, "write", write_the_first_late)
    with hostile_device():
        tiers = Tiers(device=CPU, scratch=tmp_path)
        give_back(tiers)
        tiers.settle()
        assert has_begun.wait(10)
        while tiers.disk_bytes and not is_done.is_set():
            time.sleep(0.001)
        buffer, back = tiers.stored_buffer(4 * SIZE, place="disk"), torch.zeros(SIZE)
        buffer.write(torch.full((SIZE,), 5.0)).wait()
        may_go.set()
        assert is_done.wait(10)
        buffer.read(back).wait()
        assert torch.equal(back, torch.full((SIZE,), 5.0))
        tiers.close()
