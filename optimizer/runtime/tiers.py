"""Moves whole storages between the device tier and the host tier, and counts what each copy moved.

On the CPU device both tiers are ordinary memory and a copy is a real ``memcpy``; on CUDA the host side is pinned and copies
run on a side stream, so that compute goes on. Knows nothing of blocks or autograd; that is ``activations.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimizer.categories import Category
from optimizer.runtime.meter import Meter


class HostCopy:
    """The bytes of one storage on the host tier, and the event after which they are whole (CUDA only)."""

    __slots__ = ("data", "ready")

    def __init__(self, data: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self.data = data
        self.ready = ready

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


class DeviceCopy:
    """The bytes of one storage back on the device; ``wait`` before use."""

    __slots__ = ("data", "ready")

    def __init__(self, data: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self.data = data
        self.ready = ready

    def wait(self) -> torch.Tensor:
        """The bytes, safe for the current stream to read."""
        if self.ready is not None:
            self.ready.wait()
            self.ready = None
        return self.data


class Tiers:
    """The device tier and the host tier of one run."""

    def __init__(self, *, device: torch.device, meter: Meter | None = None) -> None:
        self.device = device
        self.meter = meter
        self.to_host_bytes = 0
        """Moved from device to host since the start."""
        self.to_device_bytes = 0
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside compute, so that fetching ahead gains something."""
        return self._copy_stream is not None

    def offload(self, storage: torch.UntypedStorage, *, category: Category) -> HostCopy:
        """Copy a device storage to the host tier. The device bytes are freed when their last user lets go."""
        source = _as_bytes(storage, self.device)
        with self._region(category, on_host=True):
            data = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._copy_stream is not None)
        self.to_host_bytes += storage.nbytes()
        if self._copy_stream is None:
            data.copy_(source)
            return HostCopy(data, None)
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            data.copy_(source, non_blocking=True)
            # The allocator must not hand the source out again before this copy has read it.
            source.record_stream(self._copy_stream)
            return HostCopy(data, self._copy_stream.record_event())

    def fetch(self, copy: HostCopy, *, category: Category) -> DeviceCopy:
        """Copy host bytes back to the device, under ``category``."""
        with self._region(category, on_host=False):
            data = torch.empty(copy.num_bytes, dtype=torch.uint8, device=self.device)
        self.to_device_bytes += copy.num_bytes
        if self._copy_stream is None:
            data.copy_(copy.data)
            return DeviceCopy(data, None)
        # The block just handed out may still be read by compute queued on the main stream.
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            if copy.ready is not None:
                copy.ready.wait()
            data.copy_(copy.data, non_blocking=True)
            data.record_stream(self._copy_stream)
            return DeviceCopy(data, self._copy_stream.record_event())

    @contextmanager
    def _region(self, category: Category, *, on_host: bool) -> Iterator[None]:
        if self.meter is None:
            yield
            return
        with self.meter.region(category, tier="host" if on_host else "device"):
            yield


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
