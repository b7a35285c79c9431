"""Stands for a card where there is none: the CPU device with an allocator whose counters say what a test has it say."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimizer.base.units import GIB
from optimizer.runtime.device.backends import in_place_of_its_device
from optimizer.runtime.device.cpu import CpuBackend


class CountedMemory:
    """Memory that no op returns as a tensor, as kernels' scratch: ``spike`` is all that goes through it."""

    total_bytes = free_bytes = 64 * GIB
    allocated_bytes = reserved_bytes = 0
    peak_allocated_bytes = peak_reserved_bytes = 0

    def spike(self, num_bytes: int) -> None:
        """Have so many bytes allocated and free again."""
        self.peak_allocated_bytes = self.peak_reserved_bytes = max(self.peak_allocated_bytes, num_bytes)

    def reset_peak(self) -> None:
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def limit(self, share: float) -> None:
        """Nothing is refused."""

    def release_cached(self) -> None:
        """Nothing is cached."""

    def set_expandable_segments(self, *, is_on: bool) -> None:
        """There are no segments."""

    def clear_workspaces(self) -> None:
        """There are none."""


class CountedCard(CpuBackend):
    """Works as the CPU does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.memory: CountedMemory = CountedMemory()  # type: ignore[assignment]


@contextmanager
def counted_card() -> Iterator[CountedMemory]:
    """Inside, the CPU device has an allocator to ask."""
    card = CountedCard()
    with in_place_of_its_device(card):
        yield card.memory
