"""Reads what torch's CUDA allocator counts, and sets where it stops: the meter's second opinion, for CUDA only.

The allocator is limited a little above the budget, because its limit is on reserved memory: a plan that fits in allocated
bytes must not die of the gaps between them.
"""

import re

import torch

from optimizer.base.units import KIB
from optimizer.formats.allocator_slack import allocator_slack_bytes
from optimizer.runtime.meter.device import reserve_workspaces

_UNITS = {"B": 1, "KiB": KIB, "MiB": KIB**2, "GiB": KIB**3}


class Card:
    """One card's allocator, without the workspaces of the matrix libraries, which are the same for every plan."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.workspace_bytes = reserve_workspaces(device)

    def limit_allocator(self, cap_bytes: int) -> None:
        """``prepared_device`` lifts the limit at the end of a run."""
        # What earlier work left cached counts towards the limit.
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        limit_bytes = cap_bytes + self.workspace_bytes + allocator_slack_bytes(cap_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Most allocated since the reset."""
        return torch.cuda.max_memory_allocated(self._device) - self.workspace_bytes

    def slack_bytes(self) -> int:
        """Most reserved less most allocated since the reset: what fragmentation and caching cost."""
        return max(0, torch.cuda.max_memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device))

    def unused_bytes(self) -> int:
        """Reserved and not allocated, now."""
        return max(0, torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device))

    def in_use_and_limit(self, requested_bytes: int, *, cap_bytes: int | None) -> tuple[int, int]:
        """Bytes in use and the limit they met: the budget, else what fragmentation or other processes left of the card."""
        allocated_bytes = torch.cuda.memory_allocated(self._device) - self.workspace_bytes
        if cap_bytes is not None and allocated_bytes + requested_bytes > cap_bytes:
            return allocated_bytes, cap_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device) - self.workspace_bytes
        reachable_bytes = reserved_bytes + min(free_bytes, requested_bytes)
        return reserved_bytes, reachable_bytes if cap_bytes is None else min(reachable_bytes, cap_bytes)


def requested_in(error: torch.OutOfMemoryError) -> int:
    """Bytes that torch says it could not allocate; 0 where it does not say."""
    found = re.search(r"Tried to allocate ([0-9.]+) (GiB|MiB|KiB|B)\b", str(error))
    return round(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
