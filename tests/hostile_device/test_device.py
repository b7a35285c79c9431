"""The hostile device bites: each rule of streams, once broken, is named or shows in the bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from optimizer.runtime.device.backends import backend_of
from tests.hostile_device.backend import HostileBackend, hostile_device
from tests.hostile_device.streams import Schedule

CPU = torch.device("cpu")
SIZE = 1000


def queue_copy(backend: HostileBackend, stream: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
    """On the copy stream, after compute; returns the event after it."""
    stream.wait_stream(backend.current_stream())
    with backend.on(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


def pinned(backend: HostileBackend) -> torch.Tensor:
    return backend.empty_pinned(4 * SIZE).view(torch.float32)


@contextmanager
def at_fault(what: str, *, schedule: Schedule = "late") -> Iterator[HostileBackend]:
    """The work inside breaks a rule, and is named so."""
    with pytest.raises(AssertionError, match=what), hostile_device(schedule=schedule) as backend:
        yield backend


def test_inside_it_is_the_backend_of_the_cpu_and_outside_it_is_not() -> None:
    with hostile_device() as backend:
        assert backend_of(CPU) is backend
    assert not backend_of(CPU).is_asynchronous


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_a_copy_that_is_waited_for_brings_its_bytes(schedule: Schedule) -> None:
    with hostile_device(schedule=schedule) as backend:
        stream, home = backend.make_stream(), pinned(backend)
        source = torch.arange(float(SIZE))
        queue_copy(backend, stream, source, home).synchronize()
        assert home.tolist() == source.tolist()
        back = torch.empty(SIZE)
        backend.current_stream().wait_event(queue_copy(backend, stream, home, back))
        assert torch.equal(back, source)


def test_until_it_is_waited_for_the_destination_is_poison_and_reading_it_is_named() -> None:
    with at_fault("compute reads it in aten.*not ordered after copy stream 1, which writes it") as backend:
        stream, home, back = backend.make_stream(), pinned(backend), torch.empty(SIZE)
        home.fill_(1.0)
        queue_copy(backend, stream, home, back)
        assert bool(back.isnan().all())


def test_a_copy_that_does_not_wait_for_compute_is_named_though_its_bytes_are_right() -> None:
    with at_fault("copy stream 1 reads it in aten.copy_.*not ordered after compute, which", schedule="early") as backend:
        stream, home = backend.make_stream(), pinned(backend)
        source = torch.ones(SIZE).add_(1.0)
        with backend.on(stream):
            home.copy_(source, non_blocking=True)
        stream.synchronize()
        assert bool((home == 2).all())


def test_a_source_that_compute_writes_over_too_soon_is_copied_wrongly() -> None:
    with at_fault("compute writes it in aten.zero_") as backend:
        stream, home, source = backend.make_stream(), pinned(backend), torch.ones(SIZE)
        copied = queue_copy(backend, stream, source, home)
        source.zero_()
        copied.synchronize()
        assert bool((home == 0).all())


def test_a_host_buffer_that_is_used_again_too_soon_is_copied_wrongly() -> None:
    with at_fault("host writes it in aten.fill_") as backend:
        stream, home, back = backend.make_stream(), pinned(backend), torch.empty(SIZE)
        home.fill_(1.0)
        copied = queue_copy(backend, stream, home, back)
        home.fill_(2.0)
        backend.current_stream().wait_event(copied)
        assert bool((back == 2).all())


def test_bytes_that_the_host_reads_before_it_waited_are_poison() -> None:
    with at_fault("host reads it in aten") as backend:
        home = pinned(backend)
        queue_copy(backend, backend.make_stream(), torch.ones(SIZE), home)
        assert bool(home.isnan().all())


def test_what_compute_itself_copies_to_the_host_is_not_there_before_the_host_waited() -> None:
    with hostile_device() as backend:
        home = pinned(backend)
        home.copy_(torch.ones(SIZE), non_blocking=True)
        assert bool(torch.tensor(home.numpy()).isnan().all())
        backend.current_stream().record_event().synchronize()
        assert bool((home == 1).all())


@pytest.mark.parametrize("goes", ["source", "target"])
def test_memory_that_is_let_go_while_a_copy_uses_it_is_named(goes: str) -> None:
    with at_fault("is let go while copy stream 1 may still run aten.copy_") as backend:
        stream, home = backend.make_stream(), pinned(backend)
        tensors = [torch.ones(SIZE)]
        ways = {"source": (tensors[0], home), "target": (home, tensors[0])}
        queue_copy(backend, stream, *ways[goes])
        ways.clear()
        tensors.clear()


def test_a_storage_that_shrinks_while_a_copy_writes_to_it_is_named() -> None:
    with at_fault("memory was let go while copy stream 1 had aten.copy_.* still to do with it") as backend:
        stream, home, weight = backend.make_stream(), pinned(backend), torch.ones(SIZE)
        queue_copy(backend, stream, home, weight)
        weight.untyped_storage().resize_(0)


def test_memory_that_is_unpinned_while_a_copy_uses_it_is_named() -> None:
    with at_fault("memory was unpinned while copy stream 1 had aten.copy_") as backend:
        stream, home = backend.make_stream(), pinned(backend)
        queue_copy(backend, stream, torch.ones(SIZE), home)
        backend.unregister(home)
        stream.synchronize()


def test_new_memory_is_poison_and_so_is_what_a_storage_grows_by() -> None:
    with hostile_device():
        made = torch.empty(SIZE)
        assert bool(made.isnan().all())
        made.untyped_storage().resize_(0)
        made.untyped_storage().resize_(4 * SIZE)
        assert bool(made.isnan().all())


def test_what_would_allocate_on_the_copy_stream_is_refused() -> None:
    with hostile_device() as backend:
        source = torch.ones(SIZE)
        with pytest.raises(AssertionError, match="aten.add.* allocates on copy stream 1"), backend.on(backend.make_stream()):
            source + 1


def test_a_stream_that_waits_for_another_is_in_order_with_what_that_waited_for() -> None:
    with hostile_device() as backend:
        first, second, home, other = backend.make_stream(), backend.make_stream(), pinned(backend), pinned(backend)
        source, kept = torch.ones(SIZE).mul_(3), torch.empty(SIZE)
        queue_copy(backend, first, source, home)
        second.wait_stream(first)
        with backend.on(second):
            kept.copy_(home, non_blocking=True)
            other.copy_(kept, non_blocking=True)
        second.synchronize()
        assert bool((other == 3).all())


def _order(seed: int) -> list[bool]:
    """Report whether each of some copies was done before anybody waited."""
    with hostile_device(schedule="random", seed=seed) as backend:
        stream, homes = backend.make_stream(), [pinned(backend) for _ in range(8)]
        sources = [torch.ones(SIZE) for _ in homes]
        done = []
        for source, home in zip(sources, homes, strict=True):
            queue_copy(backend, stream, source, home)
            done.append(not bool(torch.tensor(home.numpy()).isnan().all()))
        stream.synchronize()
    return done


def test_a_seed_stands_for_an_order() -> None:
    assert _order(1) == _order(1)
    assert len({tuple(_order(seed)) for seed in range(6)}) > 1


@pytest.mark.parametrize("finish", [lambda event: event.synchronize(), lambda event: None])
def test_a_number_that_the_host_asks_for_waits_for_compute_alone(finish: Callable[[Any], None]) -> None:
    with hostile_device() as backend:
        stream, home, other = backend.make_stream(), pinned(backend), pinned(backend)
        source = torch.ones(SIZE)
        copied = queue_copy(backend, stream, source, other)
        home.copy_(source, non_blocking=True)
        assert float(source.sum()) == SIZE
        assert bool((home == 1).all())
        assert bool(torch.tensor(other.numpy()).isnan().all())
        finish(copied)
        stream.synchronize()
