import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from optimizer.plan.allocator import AllocatorPlan
from optimizer.runtime.device.cuda import CudaMemory
from optimizer.runtime.step.allocator import apply_allocator, release_unused

CPU = torch.device("cpu")


class Loop:
    """Goes only when the collector looks for it."""

    itself: "Loop"


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_cpu_device_has_no_settings_to_apply() -> None:
    apply_allocator(AllocatorPlan(expandable_segments=True), CPU)
    assert not torch.cuda.is_initialized()


def test_between_phases_garbage_goes_and_what_lives_on_is_left_out_of_later_collections() -> None:
    loop = Loop()
    loop.itself = loop
    # An address would prove nothing: another object may have it by then.
    left = weakref.ref(loop)
    del loop
    survivor = [object()]
    release_unused(CPU)
    assert left() is None
    assert all(known is not survivor for known in gc.get_objects())
    assert gc.get_freeze_count() > 0


def test_cards_settings_are_changed_without_a_warning_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)  # there need be no card to accept settings
    memory = CudaMemory(torch.device("cuda:0"))
    memory.set_expandable_segments(is_on=True)
    memory.set_expandable_segments(is_on=False)


@pytest.mark.gpu
def test_expandable_segments_are_switched_on_for_a_card() -> None:
    device = torch.device("cuda:0")
    apply_allocator(AllocatorPlan(expandable_segments=True), device)
    held = torch.zeros(64 * 2**20, dtype=torch.uint8, device=device)
    segments = torch.cuda.memory_snapshot()
    apply_allocator(AllocatorPlan(), device)
    assert held.is_cuda
    assert any(segment.get("is_expandable") for segment in segments)
