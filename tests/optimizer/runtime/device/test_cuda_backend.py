"""Each call of CUDA's backend on a card; its twins are those of the CPU's backend and of the hostile device."""

from typing import Any

import pytest
import torch

from optimizer.runtime.device.cuda import CudaBackend

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("prepared_card")]

CUDA = torch.device("cuda:0")


def test_streams_events_and_pinned_memory_answer() -> None:
    backend: Any = CudaBackend(CUDA)
    stream, home = backend.make_stream(), backend.empty_pinned(4000).view(torch.float32)
    source = torch.arange(1000.0, device=CUDA)
    stream.wait_stream(backend.current_stream())
    with backend.on(stream):
        assert backend.current_stream() == stream
        home.copy_(source, non_blocking=True)
        event = stream.record_event()
    backend.current_stream().wait_event(event)
    event.synchronize()
    assert torch.equal(home, source.cpu())
    backend.synchronize()
    assert backend.pin(torch.ones(3)).is_pinned()


def test_memory_is_pinned_where_it_lies_and_let_go() -> None:
    backend = CudaBackend(CUDA)
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    assert backend.register(data) == 0
    assert data.is_pinned()
    backend.unregister(data)
    assert not data.is_pinned()


def test_the_allocators_counters_are_torchs() -> None:
    memory = CudaBackend(CUDA).memory
    memory.reset_peak()
    held = torch.ones(1 << 20, device=CUDA)
    assert memory.allocated_bytes == torch.cuda.memory_allocated(CUDA) >= held.nbytes
    assert memory.reserved_bytes == torch.cuda.memory_reserved(CUDA)
    assert memory.peak_allocated_bytes == torch.cuda.max_memory_allocated(CUDA)
    assert memory.peak_reserved_bytes == torch.cuda.max_memory_reserved(CUDA)
    assert memory.free_bytes < memory.total_bytes


def test_random_numbers_are_drawn_again_from_their_state() -> None:
    backend = CudaBackend(CUDA)
    state = backend.random_state()
    first = torch.rand(10, device=CUDA)
    backend.set_random_state(state)
    assert torch.equal(torch.rand(10, device=CUDA), first)
