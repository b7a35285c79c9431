"""The handles that copies between tiers leave: bytes that are elsewhere or on their way, and views of bytes.

``tiers.py`` makes them. Whoever holds one holds the bytes; what it needs of streams and threads it carries with it.
"""

import contextlib
import ctypes

import torch
from torch._C import _len_torch_dispatch_stack

from optimizer.runtime.device.backend import Backend, Event
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.tiers.compression import Packing
from optimizer.runtime.tiers.host_memory import HostArena
from optimizer.runtime.tiers.transfers import StoredCopy, Transfer

_SHARED_BYTES = 128 * 1024
"""From so many on torch's threads share a copy of fp32; one alone would be as quick, but the others fall asleep meanwhile."""


class HostCopy:
    """The bytes of one storage on the host tier. Pinned ones go back to their arena with it."""

    __slots__ = ("_arena", "packing", "pieces")

    def __init__(self, pieces: tuple[torch.Tensor, ...], packing: Packing, arena: HostArena | None) -> None:
        self.pieces = pieces
        self.packing = packing
        self._arena = arena

    def __del__(self) -> None:
        if self._arena is not None:
            self._arena.give_back(self.pieces, self.packing.packed_bytes)


OffloadedCopy = HostCopy | StoredCopy


class DeviceCopy:
    """The bytes of one storage back on the device; ``wait`` before use."""

    __slots__ = ("coming", "data", "ready")

    def __init__(self, data: torch.Tensor, ready: Event | None, coming: Transfer | None = None) -> None:
        self.data = data
        self.ready = ready
        self.coming = coming

    def wait(self) -> torch.Tensor:
        """The bytes, safe for the current stream to read. Raises what reading them from a store raised."""
        if self.coming is not None:
            coming, self.coming = self.coming, None
            self.ready = coming.wait()
        if self.ready is not None:
            backend_of(self.data.device).current_stream().wait_event(self.ready)
            self.ready = None
        return self.data

    def __del__(self) -> None:
        if self.ready is None and self.coming is None:
            return
        # Never used after all: its memory must not be handed out while the copy still writes to it.
        with contextlib.suppress(Exception):
            self.wait()


class Copy:
    """A copy of a range between device and host; on the CPU device it is done."""

    __slots__ = ("_backend", "_done", "_source", "coming")

    def __init__(
        self,
        backend: Backend,
        done: Event | None,
        source: torch.Tensor | None,
        coming: Transfer | None = None,
    ) -> None:
        self._backend = backend
        self._done = done
        self._source = source
        self.coming = coming

    def wait(self) -> None:
        """Have compute queued from now on run after the copy. The host does not wait, but for a store."""
        if self.coming is not None:
            coming, self.coming = self.coming, None
            self._done = coming.wait()
        if self._done is not None:
            self._backend.current_stream().wait_event(self._done)
        self._source = None

    def finish(self) -> None:
        """Wait until the bytes are there: before the host reads what came, or writes over what went."""
        if self.coming is not None:
            coming, self.coming = self.coming, None
            self._done = coming.wait()
        if self._done is not None:
            self._done.synchronize()
        self._source = None


class Leaving:
    """Device bytes on their way out, and the event after which the last of them has left."""

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
        self.left: Event | None = None


def view_of(data: torch.Tensor, *, like: "CopyLayout") -> torch.Tensor:
    """The tensor that had this layout, over bytes that came back."""
    if data.dtype == like.dtype:
        if data.size() == like.size and data.stride() == like.stride and like.offset == 0:
            return data
        # One op less for each saved tensor.
        return data.as_strided(like.size, like.stride, like.offset)
    empty = torch.empty(0, dtype=like.dtype, device=data.device)
    return empty.set_(data.untyped_storage(), like.offset, like.size, like.stride)


class CopyLayout:
    """A tensor's layout: dtype, size, stride and offset in the storage."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's bytes with a version counter of its own, so that autograd sees no writes to it."""
    if not tensor.is_contiguous():
        raise ValueError(f"only contiguous tensors are copied by range; this one has strides {tensor.stride()}")
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def typed(storage: torch.UntypedStorage, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The whole of a storage as a flat tensor of ``dtype``; as bytes where they do not divide."""
    if storage.nbytes() % dtype.itemsize:
        dtype = torch.uint8
    num_elements = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (num_elements,), (1,))


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """On the CPU, between contiguous tensors of as many bytes; autograd's versions do not move."""
    if not (source.is_contiguous() and target.is_contiguous()):
        as_bytes(target).copy_(as_bytes(source))  # which says so
    elif _is_quick_alone(source, target):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    elif source.dtype == target.dtype and source.size() == target.size():
        target.data.copy_(source.data)
    else:
        as_bytes(target).copy_(as_bytes(source))


def _is_quick_alone(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Without torch's own work for each op. Where a mode watches ops (a meter, a trace, a count of copies), copies are ops."""
    return source.nbytes < _SHARED_BYTES and source.nbytes == target.nbytes and not _len_torch_dispatch_stack()


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
