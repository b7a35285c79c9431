"""Reads what torch's allocator of a card counts, and sets where it stops: the meter's second opinion, for cards only.

The allocator is limited a little above the budget, because its limit is on reserved memory: a plan that fits in allocated
bytes must not die of the gaps between them.
"""

import re

import torch

from optimizer.base.units import KIB
from optimizer.formats.allocator_slack import allocator_slack_bytes
from optimizer.runtime.device.backend import Backend, DeviceMemory
from optimizer.runtime.meter.device import reserve_workspaces

_UNITS = {"B": 1, "KiB": KIB, "MiB": KIB**2, "GiB": KIB**3}


class Card:
    """One card's allocator, without the workspaces of the matrix libraries, which are the same for every plan."""

    def __init__(self, backend: Backend, memory: DeviceMemory) -> None:
        """memory: the backend's."""
        self._memory = memory
        self.workspace_bytes = reserve_workspaces(backend.device)

    def limit_allocator(self, cap_bytes: int) -> None:
        """``prepared_device`` lifts the limit at the end of a run."""
        limit_bytes = cap_bytes + self.workspace_bytes + allocator_slack_bytes(cap_bytes)
        self._memory.limit(limit_bytes / self._memory.total_bytes)

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def peak_bytes(self) -> int:
        """Most allocated since the reset."""
        return self._memory.peak_allocated_bytes - self.workspace_bytes

    def slack_bytes(self) -> int:
        """Most reserved less most allocated since the reset: what fragmentation and caching cost."""
        return max(0, self._memory.peak_reserved_bytes - self._memory.peak_allocated_bytes)

    def unused_bytes(self) -> int:
        """Reserved and not allocated, now."""
        return max(0, self._memory.reserved_bytes - self._memory.allocated_bytes)

    def in_use_and_limit(self, requested_bytes: int, *, cap_bytes: int | None) -> tuple[int, int]:
        """Bytes in use and the limit they met: the budget, else what fragmentation or other processes left of the card."""
        allocated_bytes = self._memory.allocated_bytes - self.workspace_bytes
        if cap_bytes is not None and allocated_bytes + requested_bytes > cap_bytes:
            return allocated_bytes, cap_bytes
        reserved_bytes = self._memory.reserved_bytes - self.workspace_bytes
        reachable_bytes = reserved_bytes + min(self._memory.free_bytes, requested_bytes)
        return reserved_bytes, reachable_bytes if cap_bytes is None else min(reachable_bytes, cap_bytes)


def requested_in(error: torch.OutOfMemoryError) -> int:
    """Bytes that torch says it could not allocate; 0 where it does not say."""
    found = re.search(r"Tried to allocate ([0-9.]+) (GiB|MiB|KiB|B)\b", str(error))
    return round(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
