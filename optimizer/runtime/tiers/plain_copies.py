"""Copies of whole tensors between the CPU device and the host tier, in as little Python as can be.

A training step that offloads makes hundreds of them between its ops, each of some 20 us, and Python runs slowly there: what it
needs has left the caches each time. Both tiers are ordinary memory here: nothing is packed, pinned or under way.
"""

import time
from typing import NamedTuple

import torch

from optimizer.runtime.meter.lanes import Tally
from optimizer.runtime.meter.meter import Region


class PlainCopier:
    """One way, on compute's own threads."""

    __slots__ = ("_region", "_tally", "num_bytes")

    def __init__(self, tally: Tally, region: Region | None) -> None:
        """region: that copies are counted in; None where nothing is counted."""
        self._tally = tally
        self._region = region
        self.num_bytes = 0
        """Copied since the start."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """With the strides of the source, where that has no gaps. Raises OutOfHostMemory, OutOfDeviceMemory."""
        begin_s = time.perf_counter()
        if self._region is None:
            made = source.clone()
        else:
            with self._region:
                made = source.clone()
        self.num_bytes += source.nbytes
        end_s = time.perf_counter()
        tally = self._tally
        tally.busy_s += end_s - begin_s
        if tally.spans is not None:
            tally.spans.append((begin_s, end_s))
        return made


class PlainCopies(NamedTuple):
    """Copies of one category."""

    out: PlainCopier
    back: PlainCopier
