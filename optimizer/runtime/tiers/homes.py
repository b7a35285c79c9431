"""Homes of bytes that are not on the device for good: a piece of host memory, a place in the scratch file or in a remote store.

A home is flat bytes; what they mean is its owner's business. It is made once and stays until the run ends. Knows nothing of
blocks, gradients or optimizers; the copying is ``tiers.py``'s.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from optimizer.base.categories import Category, Tier
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.runtime.tiers.copies import Copy
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.runtime.tiers.transfers import StoredBuffer


class OffDeviceBytes:
    """``num_bytes`` on the host (``data``) or in a store (``stored``)."""

    def __init__(
        self,
        tiers: Tiers,
        num_bytes: int,
        *,
        place: Tier,
        category: Category,
        meets_device: bool = True,
        data: torch.Tensor | None = None,
    ) -> None:
        """Host: counted under ``category``, not initialized. Stores: read as zeros until written. Raises OutOfHostMemory,
        DiskFull, RemoteStoreFull and RemoteStoreLost.

        meets_device: whether a host home is ever copied to the device. data: a host home's bytes where they are there already,
        and counted: those that processes share.
        """
        assert place != "device"
        self._tiers = tiers
        self.num_bytes = num_bytes
        self.data = data
        self.stored: StoredBuffer | None = None
        if data is not None:
            assert place == "host"
        elif place == "host":
            self.data = tiers.host_buffer(num_bytes, dtype=torch.uint8, category=category, pinned=meets_device)
        else:
            # The scratch file is new, and nothing has given room back to it yet, so what is taken was never written to.
            self.stored = tiers.stored_buffer(num_bytes, place=place)

    def fetch(self, target: torch.Tensor) -> Copy:
        """Start to copy all of it over a contiguous device tensor."""
        if self.stored is not None:
            return self._tiers.load(self.stored, target)
        return self._tiers.copy_to_device(self.read(), target)

    def release(self) -> None:
        """Give its room back; nothing may use it after. Waits for what is under way to a store."""
        if self.stored is not None:
            self.stored.release()
        self.data = self.stored = None

    def read(self) -> torch.Tensor:
        """All bytes in host memory: the home itself, not a copy, where it is on the host."""
        if self.data is not None:
            return self.data
        assert self.stored is not None
        with on_host(self._tiers, "temporaries"):
            data = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.stored.read(data).wait()
        return data

    def write(self, source: torch.Tensor, *, dtype: torch.dtype) -> None:
        """Replace all by the numbers of a contiguous tensor, as ``dtype``, a piece at a time."""
        flat = source.detach().view(-1)
        for start, end in pieces(flat.numel()):
            with on_host(self._tiers, "temporaries"):
                # A copy: what is lent to a file can never be resized again, and a parameter must be.
                piece = flat[start:end].to(device="cpu", dtype=dtype, copy=True).view(torch.uint8)
            if self.data is not None:
                self.data[start * dtype.itemsize : end * dtype.itemsize].copy_(piece)
            elif self.stored is not None:
                self.stored.write(piece, offset_bytes=start * dtype.itemsize).wait()
            del piece  # before the next one comes


class LaterTensor(Protocol):
    """A tensor that is elsewhere until it is asked for."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int

    def load(self) -> torch.Tensor:
        """In host memory; not to be written to."""


class Home(Protocol):
    """Bytes that are elsewhere."""

    num_bytes: int

    def read(self) -> torch.Tensor:
        """All bytes in host memory; not to be written to."""


class HomeTensor:
    """A tensor at home, read when it is asked for: what a checkpoint writes one by one."""

    def __init__(self, home: Home, *, dtype: torch.dtype, shape: torch.Size) -> None:
        self._home = home
        self.dtype = dtype
        self.shape = shape
        self.nbytes = home.num_bytes

    def load(self) -> torch.Tensor:
        """In host memory; not to be written to."""
        return self._home.read().view(self.dtype).view(self.shape)


def pieces(num_elements: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``PIECE_ELEMENTS``, in order."""
    for start in range(0, num_elements, PIECE_ELEMENTS):
        yield start, min(start + PIECE_ELEMENTS, num_elements)


def on_host(tiers: Tiers, category: Category) -> AbstractContextManager[None]:
    """Storages made inside count on the host tier."""
    return nullcontext() if tiers.meter is None else tiers.meter.region(category, tier="host")
