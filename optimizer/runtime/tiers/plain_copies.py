"""Copies of whole tensors between the CPU device and the host tier, in as little Python as can be.

A training step that offloads makes hundreds of them between its ops, each of some 20 us, and Python runs slowly there: what it
needs has left the caches each time. Both tiers are ordinary memory here: nothing is packed, pinned or under way.
"""

import time

import torch

from optimizer.categories import Category
from optimizer.runtime.lanes import LaneClock
from optimizer.runtime.meter import Meter


class PlainCopies:
    """Of one category, made on compute's own threads. What comes back has the strides of what left, where that had no gaps."""

    __slots__ = ("_come", "_leave", "_on_device", "_on_host", "num_bytes_in", "num_bytes_out")

    def __init__(self, category: Category, *, meter: Meter | None, lanes: LaneClock) -> None:
        self.num_bytes_out = self.num_bytes_in = 0
        """Copied since the start."""
        self._leave, self._come = lanes.tally("copy_out"), lanes.tally("copy_in")
        self._on_host = meter.region(category, tier="host") if meter is not None else None
        self._on_device = meter.region(category) if meter is not None else None

    def leave(self, source: torch.Tensor) -> torch.Tensor:
        """The copy on the host. Raises OutOfHostMemory."""
        begin_s = time.perf_counter()
        if self._on_host is None:
            home = source.clone()
        else:
            with self._on_host:
                home = source.clone()
        self.num_bytes_out += source.nbytes
        tally = self._leave
        tally.busy_s += time.perf_counter() - begin_s
        if tally.spans is not None:
            tally.spans.append((begin_s, time.perf_counter()))
        return home

    def come_back(self, home: torch.Tensor) -> torch.Tensor:
        """The copy on the device. Raises OutOfDeviceMemory."""
        begin_s = time.perf_counter()
        if self._on_device is None:
            back = home.clone()
        else:
            with self._on_device:
                back = home.clone()
        self.num_bytes_in += home.nbytes
        tally = self._come
        tally.busy_s += time.perf_counter() - begin_s
        if tally.spans is not None:
            tally.spans.append((begin_s, time.perf_counter()))
        return back
