"""Moves bytes between the device, the host, a disk and a remote store, and counts what each link carried.

For what appears and goes with a step (activations): ``offload`` a storage, ``prefetch`` it, ``fetch`` it; it goes with its copy.
For what stays (weights, gradients, optimizer state): ``host_buffer`` and ``stored_buffer``, and copies of ranges between them.

Device and stores never meet: a copy to the disk or a remote store goes through one of a few host buffers (``STAGING_BYTES`` in
all, whatever passes), which threads of their own write and read while compute goes on; both links count.

On the CPU device the host side is ordinary memory and a copy to or from it a real ``memcpy`` that ends before it returns. On CUDA
the host side is pinned and all copies run in order on one side stream. Three rules keep that right without the host waiting:

- Device bytes that are on their way out stay allocated until the compute stream has been made to wait for the copy, at the
  latest when the block after next begins or the backbone ends (``settle``). Then they can be used again at once.
  ``record_stream`` would free them whenever the copy happens to be seen done, and memory would follow the host's lead.
- Device bytes that come back are waited for by the compute stream before their first use, or before they are let go unused.
- Pinned memory is used again as soon as its copy is queued: the next to write to it runs on the same stream.

Knows nothing of blocks or autograd; that is ``step/activations.py``.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from optimizer.base.categories import LINKS, Category, Link
from optimizer.base.errors import OutOfHostMemory
from optimizer.formats.transfer_sizes import STAGING_BYTES
from optimizer.plan.activations import Compression
from optimizer.runtime.device.backend import Event
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.meter.lanes import LaneClock
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.compression import Packing, Scratch
from optimizer.runtime.tiers.copies import (
    Copy,
    DeviceCopy,
    HostCopy,
    Leaving,
    OffloadedCopy,
    as_bytes,
    bytes_of,
    copy_bytes,
    typed,
)
from optimizer.runtime.tiers.host_memory import HostArena, PinnedBuffers, Staging
from optimizer.runtime.tiers.opened import OpenStores, StorePlace
from optimizer.runtime.tiers.plain_copies import PlainCopier, PlainCopies
from optimizer.runtime.tiers.shared_memory import SharedMemory
from optimizer.runtime.tiers.transfers import Background, StoredBuffer, StoredCopy, Transfer

OffloadPlace = Literal["host"] | StorePlace
_UNCOUNTED: AbstractContextManager[None] = nullcontext()
_MAX_LEAVING = 1
"""Groups beside the current one whose device bytes wait for their copies."""
_MAX_COPIES_OUT = 4
"""Sources of ``copy_to_host`` that are kept for their copies."""


class Tiers:
    """The tiers of one run. ``close`` it: scratch on the disk and in the remote store goes with it."""

    def __init__(
        self,
        *,
        device: torch.device,
        meter: Meter | None = None,
        scratch: Path | None = None,
        remote_url: str | None = None,
    ) -> None:
        """scratch: folder for the disk tier's file; remote_url: of the remote tier's store; both as for ``OpenStores``."""
        self.device = device
        self._backend = backend_of(device)
        self.meter = meter
        self._copied_bytes: dict[Link, int] = dict.fromkeys(LINKS, 0)
        self._plain_copies: dict[Category, PlainCopies] = {}
        self.lanes = LaneClock()
        """Times of copies, stores and waiting for them, as far as this program's threads see them."""
        self._count_lock = threading.Lock()
        self._copy_stream = self._backend.make_stream()
        self._arena = HostArena(self._backend)
        self._pinned = PinnedBuffers(self._backend)
        self._leaving: deque[Leaving] = deque()
        self._copies_out: deque[Copy] = deque()
        self._packing_scratch: dict[Compression, Scratch] = {}
        self._adopted: list[torch.Tensor] = []
        """Parts of shared memory that count here."""
        self._packings: dict[tuple[int, torch.dtype, Compression], Packing] = {}
        self._stores = OpenStores(scratch=scratch, url=remote_url)
        self._background: Background | None = None

    # What is in use, and what was moved.

    @property
    def copied_bytes(self) -> dict[Link, int]:
        """Moved over each link since the start."""
        with self._count_lock:
            copied_bytes = dict(self._copied_bytes)
        for copies in self._plain_copies.values():
            copied_bytes["device_to_host"] += copies.out.num_bytes
            copied_bytes["host_to_device"] += copies.back.num_bytes
        return copied_bytes

    @property
    def disk_bytes(self) -> int:
        """In use in the scratch file now."""
        return self._stores.used_bytes("disk")

    @property
    def remote_bytes(self) -> int:
        return self._stores.used_bytes("remote")

    @property
    def disk_peak_bytes(self) -> int:
        """Most in use since the last ``reset_peak``."""
        return self._stores.peak_bytes("disk")

    @property
    def remote_peak_bytes(self) -> int:
        return self._stores.peak_bytes("remote")

    def reset_peak(self) -> None:
        self._stores.reset_peak()

    @property
    def is_asynchronous(self) -> bool:
        """True if copies between device and host run beside compute, so that fetching ahead gains something."""
        return self._copy_stream is not None

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Not so for the random seeds that CUDA's attention kernels save: those are on the host already."""
        return tensor.device.type == self.device.type

    def close(self) -> None:
        """Stop the threads, remove the scratch file, delete the remote keys. Copies must not be used after."""
        if self._background is not None:
            self._background.close()
        self._stores.close()
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
        self._copies_out.clear()
        self._pinned.close()

    # Buffers that stay, and copies of ranges.

    def host_buffer(
        self, size: Sequence[int] | int, *, dtype: torch.dtype, category: Category, pinned: bool = True
    ) -> torch.Tensor:
        """A contiguous tensor on the host tier, counted there under ``category`` as long as it lives; on CUDA pinned, unless
        nothing is copied between it and the device.

        Not initialized. Pinned it must live no longer than the tiers. Raises OutOfHostMemory.
        """
        with self._region(category, on_host=True):
            if self._copy_stream is None or not pinned:
                buffer = torch.empty(size, dtype=dtype)
            else:
                shape = torch.Size((size,) if isinstance(size, int) else tuple(size))
                buffer = self._pinned.make(shape.numel() * dtype.itemsize).view(dtype).view(shape)
        if self.meter is not None:
            self.meter.assign(buffer, category, tier="host")
        return buffer

    def adopt(self, memory: SharedMemory, *, counted_bytes: int) -> None:
        """Pin, on CUDA, memory that processes share, and count this one's part of it as weights on the host, as long as the tiers
        live. Raises OutOfHostMemory.
        """
        if self._copy_stream is not None:
            self._pinned.register(memory.piece(0, memory.num_bytes))
        # Any place in it will do: the meter goes by storages, and homes have storages of their own, which it never sees.
        part = memory.piece(0, counted_bytes)
        self._adopted.append(part)
        if self.meter is not None:
            self.meter.assign(part, "weights", tier="host")

    def count_home(self, home: torch.Tensor) -> None:
        """Count a piece of memory that was adopted as weights on the host, as long as it lives. Raises OutOfHostMemory."""
        if self.meter is not None:
            self.meter.assign(home, "weights", tier="host")

    def finish_copies(self) -> None:
        """Wait until no copy between device and host is under way: before another process writes over what they read."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    def stored_buffer(self, num_bytes: int, *, place: StorePlace) -> StoredBuffer:
        """Room in a store, preallocated, written and read by ranges of host tensors; zeros until written.

        Raises DiskFull, RemoteStoreFull and RemoteStoreLost, at once.
        """
        return self._threads().buffer(self._stores.get(place), num_bytes)

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor, *, beside: bool = True) -> Copy:
        """Copy a device tensor over a host tensor of the same bytes, both contiguous; autograd's versions do not move.

        On CUDA it runs beside compute after what is queued now; the source's memory is kept for it, even when the caller drops
        it. ``finish`` it before the host reads the target. beside: False has it run in order with compute, for what compute waits
        for: it waits for no other copy.
        """
        self._count("device_to_host", target.nbytes)
        if self._copy_stream is None:
            with self.lanes.busy("copy_out"):
                copy_bytes(source, target)
            return Copy(self._backend, None, None)
        data, home = as_bytes(source), as_bytes(target)
        if not beside:
            home.copy_(data, non_blocking=True)
            return Copy(self._backend, self._backend.current_stream().record_event(), data)
        with self._on_copy_stream():
            home.copy_(data, non_blocking=True)
            copy = Copy(self._backend, self._copy_stream.record_event(), data)
        self._copies_out.append(copy)
        while len(self._copies_out) > _MAX_COPIES_OUT:
            self._copies_out.popleft().wait()
        return copy

    def copy_to_device(
        self, source: torch.Tensor, target: torch.Tensor, *, behind_compute: bool = True, beside: bool = True
    ) -> Copy:
        """The way back. On CUDA ``wait`` before compute uses the target, ``finish`` before the host writes to the source.

        behind_compute: False where nothing queued so far uses the target's memory, so that the copy need not wait for it.
        beside: as above; compute that is queued later finds it done.
        """
        self._count("host_to_device", target.nbytes)
        if self._copy_stream is None:
            with self.lanes.busy("copy_in"):
                copy_bytes(source, target)
            return Copy(self._backend, None, None)
        home, data = as_bytes(source), as_bytes(target)
        if not beside:
            data.copy_(home, non_blocking=True)
            return Copy(self._backend, self._backend.current_stream().record_event(), data)
        with self._on_copy_stream() if behind_compute else self._backend.on(self._copy_stream):
            data.copy_(home, non_blocking=True)
            return Copy(self._backend, self._copy_stream.record_event(), data)

    def load(self, buffer: StoredBuffer, target: torch.Tensor, *, offset_bytes: int = 0) -> Copy:
        """Copy from a store to a contiguous device tensor, through staging, in the background on CUDA. ``wait`` before use.

        What was written to the range before is waited for.
        """
        data = as_bytes(target)
        with buffer.moving(Packing(data.nbytes, dtype=torch.uint8), offset_bytes, is_write=False) as part:
            coming = self._read_units(part, data)
        return Copy(self._backend, None, data if coming is not None else None, coming)

    def save(self, source: torch.Tensor, buffer: StoredBuffer, *, offset_bytes: int = 0) -> None:
        """Copy a contiguous device tensor to a store, through staging; written in the background, and waited for by what
        reads the range next. The source may be dropped or written to (by compute queued later) at once.
        """
        data = as_bytes(source)
        with buffer.moving(Packing(data.nbytes, dtype=torch.uint8), offset_bytes, is_write=True) as part:
            self._write_units(part, data)
        if self._copy_stream is not None:
            self._backend.current_stream().wait_stream(self._copy_stream)

    # Storages that leave and come back.

    def begin_group(self) -> None:
        """Begin a group of offloads that belong together; one earlier group may still be leaving."""
        if self._copy_stream is not None:
            self.settle(keep=_MAX_LEAVING)
            self._leaving.append(Leaving())

    def settle(self, *, keep: int = 0) -> None:
        """Let go of device bytes that were offloaded, but for the newest ``keep`` groups."""
        while len(self._leaving) > keep:
            group = self._leaving.popleft()
            if group.left is not None:
                self._backend.current_stream().wait_event(group.left)

    def prepare_compression(self, compress: Compression) -> None:
        """Make the packer's buffers now, counted as temporaries on the device: they stay as long as the run."""
        if compress == "none" or compress in self._packing_scratch:
            return
        with self._region("temporaries", on_host=False):
            scratch = Scratch(compress, device=self.device)
        if self.meter is not None:
            for tensor in (scratch.packed, scratch.wide):
                if tensor.nbytes:
                    self.meter.assign(tensor, "temporaries")
        self._packing_scratch[compress] = scratch

    def open_store(self, place: OffloadPlace) -> None:
        """Open what ``place`` needs now, so that what is missing is named before the run: a folder, a store, a package."""
        if place != "host":
            self._stores.get(place)

    def offload(
        self,
        storage: torch.UntypedStorage,
        *,
        category: Category,
        dtype: torch.dtype = torch.uint8,
        place: OffloadPlace = "host",
        compress: Compression = "none",
    ) -> OffloadedCopy:
        """Copy a device storage away. On CUDA its device bytes are let go by ``begin_group`` and ``settle``.

        dtype: of the tensors over it; decides what ``compress`` makes of it.
        Raises OutOfHostMemory, DiskFull, RemoteStoreFull, RemoteStoreLost, and so may ``fetch`` for what was written meanwhile.
        """
        packing = self._packing(storage.nbytes(), dtype, compress)
        if place == "host" and packing.compress == "none" and not self.is_asynchronous:
            # By dtype, so that a trace shows what could be packed.
            home = self.plain_copies(category).out.copy(typed(storage, dtype=dtype, device=self.device))
            return HostCopy((home,), packing, None)
        source = bytes_of(storage, self.device)
        copy: OffloadedCopy
        if place == "host":
            copy = self._offload_to_host(source, packing, category)
        else:
            copy = self._staged().copy(self._stores.get(place), packing)
            self._write_units(copy, source)
        if self._copy_stream is not None:
            if not self._leaving:
                self._leaving.append(Leaving())
            self._leaving[-1].left = self._copy_stream.record_event()
            self._leaving[-1].sources.append(source)
        return copy

    def plain_copies(self, category: Category) -> PlainCopies:
        """``offload`` to the host and ``fetch`` on the CPU device, for tensors instead of storages."""
        found = self._plain_copies.get(category)
        if found is None:
            on_host = on_device = None
            if self.meter is not None:
                on_host, on_device = self.meter.region(category, tier="host"), self.meter.region(category)
            out = PlainCopier(self.lanes.tally("copy_out"), on_host)
            found = self._plain_copies[category] = PlainCopies(out, PlainCopier(self.lanes.tally("copy_in"), on_device))
        return found

    def prefetch(self, copies: Sequence[OffloadedCopy]) -> None:
        """Read ahead from the stores into staging, in this order, as far as it goes. Of no effect on what is on the host.

        For the CPU device; on CUDA ``fetch`` itself runs in the background.
        """
        stored = [copy for copy in copies if isinstance(copy, StoredCopy)]
        if stored and not self.is_asynchronous:
            self._staged().read_ahead(stored)

    def fetch(self, copy: OffloadedCopy, *, category: Category) -> DeviceCopy:
        """Copy bytes back to the device, under ``category``."""
        packing = copy.packing
        if isinstance(copy, HostCopy) and packing.compress == "none" and not self.is_asynchronous:
            (home,) = copy.pieces
            return DeviceCopy(self.plain_copies(category).back.copy(home), None)
        with self._region(category, on_host=False):
            data = torch.empty(packing.num_bytes, dtype=torch.uint8, device=self.device)
        if isinstance(copy, StoredCopy):
            return DeviceCopy(data, None, self._read_units(copy, data))
        self._count("host_to_device", packing.packed_bytes)
        if self._copy_stream is None:
            with self.lanes.busy("copy_in"):
                packing.unpack(copy.pieces, data)
            return DeviceCopy(data, None)
        with self._on_copy_stream():
            packing.unpack(copy.pieces, data)
            return DeviceCopy(data, self._copy_stream.record_event())

    # Helpers.

    def _packing(self, num_bytes: int, dtype: torch.dtype, compress: Compression) -> Packing:
        """Made once for storages that are alike."""
        found = self._packings.get((num_bytes, dtype, compress))
        if found is None:
            self.prepare_compression(compress)
            found = Packing(num_bytes, dtype=dtype, compress=compress, scratch=self._packing_scratch.get(compress))
            self._packings[num_bytes, dtype, compress] = found
        return found

    def _offload_to_host(self, source: torch.Tensor, packing: Packing, category: Category) -> HostCopy:
        self._count("device_to_host", packing.packed_bytes)
        if self._copy_stream is not None:
            copy = HostCopy(self._take_pinned(packing.packed_bytes, category), packing, self._arena)
            with self._on_copy_stream():
                packing.pack(source, copy.pieces)
            return copy
        with self._region(category, on_host=True):
            data = torch.empty(packing.packed_bytes, dtype=torch.uint8)
        with self.lanes.busy("copy_out"):
            packing.pack(source, (data,))
        return HostCopy((data,), packing, None)

    def _write_units(self, copy: StoredCopy, source: torch.Tensor) -> None:
        """Through the slabs to the store: the device's part here, the store's part in the background."""
        background = self._staged()
        for unit in copy.units:
            with self.lanes.waiting(copy.store.lane):
                slab = background.slab_to_fill()
            num_bytes = unit.packed_end - unit.packed_start
            pieces = (slab.data[:num_bytes],)
            filled: Event | None = None
            if self._copy_stream is None:
                with self.lanes.busy("copy_out"):
                    copy.packing.pack(source[unit.start : unit.end], pieces)
            else:
                with self._on_copy_stream():
                    copy.packing.pack(source[unit.start : unit.end], pieces)
                    filled = self._copy_stream.record_event()
            self._count("device_to_host", num_bytes)
            self._count(copy.store.write_link, num_bytes)
            background.write(copy, unit, slab, after=filled)

    def _read_units(self, copy: StoredCopy, data: torch.Tensor) -> Transfer | None:
        """From the store through the slabs: on CUDA all of it in the background."""
        background = self._staged()
        self._count(copy.store.read_link, copy.packing.packed_bytes)
        self._count("host_to_device", copy.packing.packed_bytes)
        if self._copy_stream is not None:
            # The memory just handed out may still be read by compute queued on the main stream.
            after = self._backend.current_stream().record_event()
            return background.fetch(copy, data, backend=self._backend, stream=self._copy_stream, after=after)
        for unit in copy.units:
            with self.lanes.waiting(copy.store.lane):
                slab = background.read_now(copy, unit)
            with self.lanes.busy("copy_in"):
                copy.packing.unpack((slab.data[: unit.packed_end - unit.packed_start],), data[unit.start : unit.end])
            background.done_reading(slab)
        return None

    def _threads(self) -> Background:
        if self._background is None:
            self._background = Background(count=self._count, lanes=self.lanes)
        return self._background

    def _staged(self) -> Background:
        """The threads, and what they stage through."""
        background = self._threads()
        if background.staging is None:
            with self._region("temporaries", on_host=True):
                memory = self._backend.empty_pinned(STAGING_BYTES)
            if self.meter is not None:
                self.meter.assign(memory, "temporaries", tier="host")
            background.staging = Staging(memory)
        return background

    def _count(self, link: Link, num_bytes: int) -> None:
        # Updates on the host count from a thread of their own.
        with self._count_lock:
            self._copied_bytes[link] += num_bytes

    def _take_pinned(self, num_bytes: int, category: Category) -> tuple[torch.Tensor, ...]:
        try:
            with self._region(category, on_host=True):
                return self._arena.take(num_bytes)
        except RuntimeError as error:
            # The driver's refusal to pin more; the meter's own refusal is another type and passes.
            raise OutOfHostMemory(
                requested_bytes=self._arena.slab_bytes,
                in_use_bytes=self._arena.taken_bytes,
                budget_bytes=self._arena.taken_bytes,
                bytes_by_category={category: self._arena.taken_bytes},
                hint=f"The driver pins no more memory ({str(error).partition(chr(10))[0]}). Offload less.",
            ) from error

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """After all that compute has queued so far."""
        assert self._copy_stream is not None
        self._copy_stream.wait_stream(self._backend.current_stream())
        with self._backend.on(self._copy_stream):
            yield

    def _region(self, category: Category, *, on_host: bool) -> AbstractContextManager[None]:
        if self.meter is None:
            return _UNCOUNTED
        return self.meter.region(category, tier="host" if on_host else "device")
