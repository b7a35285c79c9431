"""Host memory that copies go to and come from: an arena used again by size, buffers that stay, and slabs to stage through.

On CUDA all of it is pinned, without which no copy runs beside compute. torch rounds what it pins up to a power of two, so the
arena and the slabs are taken in such pieces, and buffers that stay are pinned where they lie (``cudaHostRegister``), to the byte.
"""

import mmap
import queue
from collections.abc import Iterator
from typing import Any

import torch

from optimizer.base.errors import OutOfHostMemory
from optimizer.formats.transfer_sizes import ARENA_SLAB_BYTES, NUM_SLABS_EACH_WAY, SLAB_BYTES
from optimizer.runtime.device.backend import Backend, Event

_ALIGNMENT_BYTES = 512


class HostArena:
    """Pinned memory cut into buffers one after another, across slabs, and used again by exact size.

    A step asks for the same sizes as the one before, so nothing is taken after the first. Nothing is given back to the
    system until the arena goes.
    """

    def __init__(self, backend: Backend, *, slab_bytes: int = ARENA_SLAB_BYTES) -> None:
        self.slab_bytes = slab_bytes
        self._backend = backend
        self._slabs: list[torch.Tensor] = []
        self._used_bytes = 0
        """Bytes used of the newest slab."""
        self._free: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes taken from the system, in whole slabs."""
        return len(self._slabs) * self.slab_bytes

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ...]:
        """Bytes on the host in as many pieces as slabs they lie in."""
        free = self._free.get(num_bytes)
        return free.pop() if free else tuple(self._cut(num_bytes))

    def give_back(self, pieces: tuple[torch.Tensor, ...], num_bytes: int) -> None:
        self._free.setdefault(num_bytes, []).append(pieces)

    def _cut(self, num_bytes: int) -> Iterator[torch.Tensor]:
        left_bytes = num_bytes
        while left_bytes > 0:
            if not self._slabs or self._used_bytes == self.slab_bytes:
                self._slabs.append(self._backend.empty_pinned(self.slab_bytes))
                self._used_bytes = 0
            start = self._used_bytes
            size = min(left_bytes, self.slab_bytes - start)
            yield self._slabs[-1][start : start + size]
            left_bytes -= size
            end = start + size
            self._used_bytes = min(self.slab_bytes, -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)


class Slab:
    """One staging buffer, as a tensor and as what files and sockets take."""

    __slots__ = ("data", "free_after", "view")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.view = host_view(data)
        self.free_after: Event | None = None
        """A copy from it that is still queued."""


class Staging:
    """The slabs between the device and the stores: as many for each way, so that reading never waits for writing."""

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: ``packing.STAGING_BYTES`` on the host."""
        slabs = [Slab(memory[start : start + SLAB_BYTES]) for start in range(0, memory.numel(), SLAB_BYTES)]
        self.writing, self.reading = _Slabs(slabs[:NUM_SLABS_EACH_WAY]), _Slabs(slabs[NUM_SLABS_EACH_WAY:])


class _Slabs:
    """From any thread."""

    def __init__(self, slabs: list[Slab]) -> None:
        self._free: queue.SimpleQueue[Slab] = queue.SimpleQueue()
        for slab in slabs:
            self._free.put(slab)

    def take(self) -> Slab:
        """Waits until one is free."""
        slab = self._free.get()
        if slab.free_after is not None:
            after, slab.free_after = slab.free_after, None
            try:
                after.synchronize()
            except BaseException:
                # Whoever waits for a slab is to meet the device's error as well, and not to wait for ever.
                self.give_back(slab, after=after)
                raise
        return slab

    def take_if_free(self) -> Slab | None:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def give_back(self, slab: Slab, *, after: Event | None = None) -> None:
        slab.free_after = after
        self._free.put(slab)


class PinnedBuffers:
    """Buffers of exact size that stay pinned until ``close``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._registered: list[torch.Tensor] = []

    def make(self, num_bytes: int) -> torch.Tensor:
        """Bytes, zeroed. Raises OutOfHostMemory where the driver pins no more."""
        # Pages of its own: two buffers in one page cannot both be registered.
        data = torch.frombuffer(mmap.mmap(-1, max(1, num_bytes)), dtype=torch.uint8)
        self.register(data)
        return data[:num_bytes]

    def register(self, data: torch.Tensor) -> None:
        """Pin memory where it lies, whole pages that nothing else has pinned. Raises OutOfHostMemory."""
        status = self._backend.register(data)
        if status != 0:
            pinned_bytes = sum(buffer.nbytes for buffer in self._registered)
            raise OutOfHostMemory(
                requested_bytes=data.nbytes,
                in_use_bytes=pinned_bytes,
                budget_bytes=pinned_bytes,
                bytes_by_category={},
                hint=f"The driver pins no more memory (cudaHostRegister: error {status}). Offload less.",
            )
        self._registered.append(data)

    def close(self) -> None:
        while self._registered:
            self._backend.unregister(self._registered.pop())


def host_view(data: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor on the host, which they keep alive, as files and sockets take them."""
    array: Any = data.numpy()
    return memoryview(array)
