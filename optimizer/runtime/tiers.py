"""Moves whole storages between the device tier and the host tier, and counts what each copy moved.

On the CPU device both tiers are ordinary memory and a copy is a real ``memcpy``. On CUDA the host side is pinned and all
copies run in order on one side stream, so that compute goes on. Three rules keep that right without the host ever waiting:

- Device bytes that are on their way out stay allocated until the compute stream has been told to wait for the copy, at the
  latest when the block after next begins or the backbone ends (``settle``). Then they can be used again at once.
  ``record_stream`` would free them whenever the copy happens to be seen done, and memory would follow the host's lead.
- Device bytes that come back are waited for by the compute stream before their first use, or before they are let go unused.
- Pinned memory is used again as soon as its copy is queued: the next to write to it runs on the same stream.

Knows nothing of blocks or autograd; that is ``activations.py``.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimizer.categories import Category
from optimizer.errors import OutOfHostMemory
from optimizer.runtime.meter import Meter
from optimizer.units import MIB

SLAB_BYTES = 16 * MIB
"""Pinned memory is taken in pieces of this size. A power of two, because torch rounds each piece up to one."""
_ALIGNMENT_BYTES = 512
_MAX_LEAVING = 1
"""Groups beside the current one whose device bytes wait for their copies."""


class HostArena:
    """Pinned memory cut into buffers one after another, across slabs, and used again by exact size.

    A step asks for the same sizes as the one before, so nothing is taken after the first. Nothing is given back to the
    system until the arena goes.
    """

    def __init__(self, *, slab_bytes: int = SLAB_BYTES, pinned: bool = True) -> None:
        self._slab_bytes = slab_bytes
        self._pinned = pinned
        self._slabs: list[torch.Tensor] = []
        self._used_bytes = 0
        """Of the newest slab."""
        self._free: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    @property
    def taken_bytes(self) -> int:
        """Of the system, whole slabs."""
        return len(self._slabs) * self._slab_bytes

    def take(self, num_bytes: int) -> tuple[torch.Tensor, ...]:
        """Bytes on the host in as many pieces as slabs they lie in."""
        free = self._free.get(num_bytes)
        return free.pop() if free else tuple(self._cut(num_bytes))

    def give_back(self, pieces: tuple[torch.Tensor, ...], num_bytes: int) -> None:
        self._free.setdefault(num_bytes, []).append(pieces)

    def _cut(self, num_bytes: int) -> Iterator[torch.Tensor]:
        left_bytes = num_bytes
        while left_bytes > 0:
            if not self._slabs or self._used_bytes == self._slab_bytes:
                self._slabs.append(torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned))
                self._used_bytes = 0
            start = self._used_bytes
            size = min(left_bytes, self._slab_bytes - start)
            yield self._slabs[-1][start : start + size]
            left_bytes -= size
            end = start + size
            self._used_bytes = min(self._slab_bytes, -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)


class HostCopy:
    """The bytes of one storage on the host tier. Pinned ones go back to their arena with it."""

    __slots__ = ("_arena", "num_bytes", "pieces")

    def __init__(self, pieces: tuple[torch.Tensor, ...], num_bytes: int, arena: HostArena | None) -> None:
        self.pieces = pieces
        self.num_bytes = num_bytes
        self._arena = arena

    def __del__(self) -> None:
        if self._arena is not None:
            self._arena.give_back(self.pieces, self.num_bytes)


class DeviceCopy:
    """The bytes of one storage back on the device; ``wait`` before use."""

    __slots__ = ("data", "ready")

    def __init__(self, data: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self.data = data
        self.ready = ready

    def wait(self) -> torch.Tensor:
        """The bytes, safe for the current stream to read."""
        if self.ready is not None:
            torch.cuda.current_stream(self.data.device).wait_event(self.ready)
            self.ready = None
        return self.data

    def __del__(self) -> None:
        # Never used after all: its memory must not be handed out while the copy still writes to it.
        self.wait()


class _Leaving:
    """Device bytes on their way out, and the event after which the last of them has left."""

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
        self.left: torch.cuda.Event | None = None


class Tiers:
    """The device tier and the host tier of one run."""

    def __init__(self, *, device: torch.device, meter: Meter | None = None) -> None:
        self.device = device
        self.meter = meter
        self.to_host_bytes = 0
        """Moved from device to host since the start."""
        self.to_device_bytes = 0
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arena = HostArena()
        self._leaving: deque[_Leaving] = deque()

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside compute, so that fetching ahead gains something."""
        return self._copy_stream is not None

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Not so for the random seeds that CUDA's attention kernels save: those are on the host already."""
        return tensor.device.type == self.device.type

    def begin_group(self) -> None:
        """What is offloaded from here on belongs together; of what was before, one group more may still be leaving."""
        if self._copy_stream is not None:
            self.settle(keep=_MAX_LEAVING)
            self._leaving.append(_Leaving())

    def settle(self, *, keep: int = 0) -> None:
        """Let go of device bytes that were offloaded, but for the newest ``keep`` groups."""
        while len(self._leaving) > keep:
            group = self._leaving.popleft()
            if group.left is not None:
                torch.cuda.current_stream(self.device).wait_event(group.left)

    def offload(self, storage: torch.UntypedStorage, *, category: Category) -> HostCopy:
        """Copy a device storage to the host tier. On CUDA its device bytes are let go by ``begin_group`` and ``settle``."""
        source = _as_bytes(storage, self.device)
        num_bytes = storage.nbytes()
        self.to_host_bytes += num_bytes
        if self._copy_stream is None:
            with self._region(category, on_host=True):
                data = torch.empty(num_bytes, dtype=torch.uint8)
            data.copy_(source)
            return HostCopy((data,), num_bytes, None)
        copy = HostCopy(self._take_pinned(num_bytes, category), num_bytes, self._arena)
        if not self._leaving:
            self._leaving.append(_Leaving())
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            _copy_pieces(copy.pieces, source, to_host=True)
            self._leaving[-1].left = self._copy_stream.record_event()
        self._leaving[-1].sources.append(source)
        return copy

    def fetch(self, copy: HostCopy, *, category: Category) -> DeviceCopy:
        """Copy host bytes back to the device, under ``category``."""
        with self._region(category, on_host=False):
            data = torch.empty(copy.num_bytes, dtype=torch.uint8, device=self.device)
        self.to_device_bytes += copy.num_bytes
        if self._copy_stream is None:
            data.copy_(copy.pieces[0])
            return DeviceCopy(data, None)
        # The block just handed out may still be read by compute queued on the main stream.
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            _copy_pieces(copy.pieces, data, to_host=False)
            return DeviceCopy(data, self._copy_stream.record_event())

    def _take_pinned(self, num_bytes: int, category: Category) -> tuple[torch.Tensor, ...]:
        try:
            with self._region(category, on_host=True):
                return self._arena.take(num_bytes)
        except RuntimeError as error:
            # The driver's refusal to pin more; the meter's own refusal is another type and passes.
            raise OutOfHostMemory(
                requested_bytes=SLAB_BYTES,
                in_use_bytes=self._arena.taken_bytes,
                budget_bytes=self._arena.taken_bytes,
                bytes_by_category={category: self._arena.taken_bytes},
                hint=f"The driver pins no more memory ({str(error).partition(chr(10))[0]}). Offload less.",
            ) from error

    @contextmanager
    def _region(self, category: Category, *, on_host: bool) -> Iterator[None]:
        if self.meter is None:
            yield
            return
        with self.meter.region(category, tier="host" if on_host else "device"):
            yield


def _copy_pieces(pieces: tuple[torch.Tensor, ...], data: torch.Tensor, *, to_host: bool) -> None:
    start = 0
    for piece in pieces:
        part = data[start : start + piece.numel()]
        if to_host:
            piece.copy_(part, non_blocking=True)
        else:
            part.copy_(piece, non_blocking=True)
        start += piece.numel()


def view_of(data: torch.Tensor, *, like: "Layout") -> torch.Tensor:
    """The tensor that had this layout, over bytes that came back."""
    empty = torch.empty(0, dtype=like.dtype, device=data.device)
    return empty.set_(data.untyped_storage(), like.offset, like.size, like.stride)


class Layout:
    """What a tensor is besides its bytes: dtype, size, stride and offset in the storage."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
