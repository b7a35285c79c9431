"""The threads that write to and read from the stores while compute goes on, and what they have under way.

Memory is bounded by the slabs of ``Staging``: who fills one waits until a writer has emptied one, and reading ahead stops when
none is free. What a thread meets (a full disk, a store that is gone) is raised where the next slab is asked for, or the bytes.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from optimizer.base.categories import Lane, Link
from optimizer.formats.transfer_sizes import SLAB_BYTES
from optimizer.runtime.device.backend import Backend, Event, Stream
from optimizer.runtime.meter.lanes import LaneClock
from optimizer.runtime.tiers.compression import Packing, Unit
from optimizer.runtime.tiers.host_memory import Slab, Staging, host_view
from optimizer.runtime.tiers.stores import Place, Store

_NUM_THREADS_EACH_WAY = 2
Earlier = Sequence[Future[Any]]


class Transfer:
    """Something that threads do meanwhile."""

    __slots__ = ("_futures",)

    def __init__(self, futures: Sequence[Future[Event | None]] | Sequence[Future[None]]) -> None:
        self._futures = futures

    def wait(self) -> Event | None:
        """Until it is done; the event, if any, after which a copy on CUDA is. Raises what the threads met."""
        event: Event | None = None
        for future in self._futures:
            event = future.result()
        return event


class StoredCopy:
    """The bytes of one storage in a store, or on their way there. Their room is given back with it."""

    __slots__ = (
        "__weakref__",
        "_release",
        "after",
        "ahead",
        "base",
        "fetches",
        "packing",
        "place",
        "store",
        "units",
        "wanted",
        "writes",
    )

    def __init__(
        self,
        store: Store,
        place: Place,
        packing: Packing,
        *,
        base: int = 0,
        after: Earlier = (),
        release: "Callable[[StoredCopy], None] | None" = None,
    ) -> None:
        self.store = store
        self.place = place
        self.packing = packing
        self.base = base
        """Offset in the place at which it begins."""
        self.units = packing.units(SLAB_BYTES)
        self.after = after
        """Transfers begun before on the same range."""
        self.writes: list[Future[None]] = []
        """Its own."""
        self.ahead: dict[int, Future[Slab]] = {}
        """Units being read before they are asked for, by number."""
        self.fetches: list[Future[Event | None]] = []
        """Ways back that are under way."""
        self.wanted: set[int] = set()
        """Units that are to be read ahead."""
        self._release = release

    def written(self) -> Earlier:
        """Transfers that have to be done before its own bytes are read."""
        return [*self.after, *self.writes]

    def __del__(self) -> None:
        if self._release is not None:
            with contextlib.suppress(Exception):
                self._release(self)


class StoredBuffer:
    """Room in a store that stays until ``close`` of the tiers, written and read by ranges of contiguous host tensors.

    From any thread. What overlaps happens in the order in which it was begun.
    """

    def __init__(self, background: "Background", store: Store, place: Place) -> None:
        self._background = background
        self._store = store
        self._place = place
        self._lock = threading.Lock()
        self._under_way: list[_Use] = []

    @property
    def num_bytes(self) -> int:
        return self._place.num_bytes

    @property
    def lane(self) -> Lane:
        """The lane that reading it occupies."""
        return self._store.lane

    def release(self) -> None:
        """Give the room back once nothing is under way; what failed on its way is of no more interest."""
        for use in self._under_way:
            use.future.exception()
        self._store.give_back(self._place)

    def write(self, source: torch.Tensor, *, offset_bytes: int = 0) -> Transfer:
        """Begin to write a host tensor; it must not change until the transfer is waited for.

        Raises ValueError beyond the buffer's end.
        """
        data = _view(source)
        start, end = self._range(offset_bytes, len(data))
        with self._lock:
            after = self._overlapping(start, end, with_reads=True)
            future = self._background.write_range(self._store, self._place, data, offset=start, after=after)
            self._under_way.append(_Use(start, end, future, is_write=True))
        return Transfer([future])

    def read(self, target: torch.Tensor, *, offset_bytes: int = 0) -> Transfer:
        """Begin to read into a host tensor, which holds the bytes when the transfer has been waited for."""
        data = _view(target)
        start, end = self._range(offset_bytes, len(data))
        with self._lock:
            after = self._overlapping(start, end, with_reads=False)
            future = self._background.read_range(self._store, self._place, data, offset=start, after=after)
            self._under_way.append(_Use(start, end, future, is_write=False))
        return Transfer([future])

    @contextmanager
    def moving(self, packing: Packing, offset_bytes: int, *, is_write: bool) -> Iterator[StoredCopy]:
        """A range to be copied from the device (``is_write``) or to it; begin that inside."""
        start, end = self._range(offset_bytes, packing.packed_bytes)
        with self._lock:
            after = self._overlapping(start, end, with_reads=is_write)
            part = StoredCopy(self._store, self._place, packing, base=start, after=after)
            yield part
            futures: list[Future[Any]] = [*part.writes, *part.fetches]
            self._under_way += [_Use(start, end, future, is_write=is_write) for future in futures]

    def _overlapping(self, start: int, end: int, *, with_reads: bool) -> list[Future[Any]]:
        """Transfers that touch the range and are not done, or failed."""
        self._under_way = [use for use in self._under_way if use.is_under_way()]
        return [
            use.future
            for use in self._under_way
            if use.start < end and start < use.end and (use.is_write or with_reads)
        ]

    def _range(self, offset_bytes: int, num_bytes: int) -> tuple[int, int]:
        end = offset_bytes + num_bytes
        if offset_bytes < 0 or end > self.num_bytes:
            raise ValueError(f"bytes {offset_bytes} to {end} of a buffer of {self.num_bytes}")
        return offset_bytes, end


class _Use:
    """A range of a buffer that is being written or read."""

    __slots__ = ("end", "future", "is_write", "start")

    def __init__(self, start: int, end: int, future: Future[Any], *, is_write: bool) -> None:
        self.start = start
        self.end = end
        self.future = future
        self.is_write = is_write

    def is_under_way(self) -> bool:
        """Or was a write that failed, which whoever comes to the range has to hear of."""
        return not self.future.done() or (self.is_write and self.future.exception() is not None)


class Background:
    """Two threads that write, two that read, and the slabs between them and the device."""

    def __init__(self, *, count: Callable[[Link, int], None], lanes: LaneClock) -> None:
        self.staging: Staging | None = None
        """To be set before bytes come from the device or go to it; ranges of host tensors need none."""
        self._count = count
        self._lanes = lanes
        self._writers, self._readers = (
            ThreadPoolExecutor(_NUM_THREADS_EACH_WAY, thread_name_prefix=name, initializer=lanes.enter_thread)
            for name in ("headroom-write", "headroom-read")
        )
        self._failure: BaseException | None = None
        self._to_read: deque[tuple[weakref.ref[StoredCopy], int]] = deque()
        self._ahead: dict[Future[Slab], tuple[weakref.ref[StoredCopy], int]] = {}
        """Reads ahead under way or done, oldest first."""
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._writers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def copy(self, store: Store, packing: Packing) -> StoredCopy:
        """Room for a storage, still empty."""
        return StoredCopy(store, store.take(packing.packed_bytes), packing, release=self._release)

    def buffer(self, store: Store, num_bytes: int) -> StoredBuffer:
        return StoredBuffer(self, store, store.take(num_bytes, is_made=True))

    @property
    def _slabs(self) -> Staging:
        assert self.staging is not None
        return self.staging

    # Writing.

    def slab_to_fill(self) -> Slab:
        """Waits for a writer where all are full. Raises what a writer met."""
        slab = self._slabs.writing.take()
        if self._failure is not None:
            self._slabs.writing.give_back(slab)
            raise self._failure
        return slab

    def write(self, copy: StoredCopy, unit: Unit, slab: Slab, *, after: Event | None) -> None:
        """Begin to write a slab that was filled, or is once ``after`` has happened."""
        # The copy itself is not held: its room is given back when its owner drops it, not when a thread does.
        data = slab.view[: unit.packed_end - unit.packed_start]
        offset = copy.base + unit.packed_start
        future = self._writers.submit(self._write, copy.store, copy.place, data, offset, slab, after, copy.after)
        copy.writes.append(future)

    def _write(
        self,
        store: Store,
        place: Place,
        data: memoryview,
        offset: int,
        slab: Slab,
        after: Event | None,
        earlier: Earlier,
    ) -> None:
        try:
            _wait_for(earlier)
            if after is not None:
                after.synchronize()
            with self._lanes.busy(store.lane):
                store.write(place, data, offset=offset)
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._slabs.writing.give_back(slab)

    # Reading on the CPU device: ahead into slabs, from which the caller copies.

    def read_ahead(self, copies: Sequence[StoredCopy]) -> None:
        """Queue what is not queued yet."""
        for copy in copies:
            for number in range(len(copy.units)):
                if number not in copy.ahead and number not in copy.wanted:
                    copy.wanted.add(number)
                    self._to_read.append((weakref.ref(copy), number))
        self._read_on()

    def read_now(self, copy: StoredCopy, unit: Unit) -> Slab:
        """A slab with the unit's bytes; to be given to ``done_reading``."""
        number = copy.units.index(unit)
        copy.wanted.discard(number)
        future = copy.ahead.pop(number, None)
        if future is not None:
            self._ahead.pop(future, None)
            return future.result()
        slab = self._slab_to_read()
        return self._read(copy.store, copy.place, copy.base, unit, slab, copy.written())

    def done_reading(self, slab: Slab) -> None:
        self._slabs.reading.give_back(slab)
        self._read_on()

    def _read_on(self) -> None:
        """Start reading what is queued, as far as slabs are free."""
        while self._to_read:
            slab = self._slabs.reading.take_if_free()
            if slab is None:
                return
            entry = self._to_read.popleft()
            copy = entry[0]()
            if copy is None or entry[1] not in copy.wanted:
                self._slabs.reading.give_back(slab)
                continue
            number = entry[1]
            copy.wanted.discard(number)
            unit = copy.units[number]
            future = self._readers.submit(self._read, copy.store, copy.place, copy.base, unit, slab, copy.written())
            copy.ahead[number] = future
            self._ahead[future] = entry

    def _slab_to_read(self) -> Slab:
        """The buffer that was read last, where all hold what was read ahead."""
        while True:
            slab = self._slabs.reading.take_if_free()
            if slab is not None or not self._ahead:
                return slab or self._slabs.reading.take()
            future, (reference, number) = self._ahead.popitem()
            copy = reference()
            # Where it has gone, its slab comes back by itself.
            if copy is not None and copy.ahead.pop(number, None) is not None:
                copy.wanted.add(number)
                self._to_read.appendleft((reference, number))
                return future.result()

    def _read(self, store: Store, place: Place, base: int, unit: Unit, slab: Slab, writes: Earlier) -> Slab:
        try:
            _wait_for(writes)
            with self._lanes.busy(store.lane):
                store.read(place, slab.view[: unit.packed_end - unit.packed_start], offset=base + unit.packed_start)
        except BaseException:
            self._slabs.reading.give_back(slab)
            raise
        return slab

    # Reading on CUDA: all the way to the device, in the background.

    def fetch(
        self, copy: StoredCopy, data: torch.Tensor, *, backend: Backend, stream: Stream, after: Event
    ) -> Transfer:
        """Begin to bring a copy's bytes into device memory that is free to be written to once ``after`` has happened."""
        future = self._readers.submit(
            self._fetch,
            copy.store,
            copy.place,
            copy.base,
            copy.units,
            copy.packing,
            copy.written(),
            data,
            backend,
            stream,
            after,
        )
        copy.fetches.append(future)
        return Transfer([future])

    def _fetch(
        self,
        store: Store,
        place: Place,
        base: int,
        units: list[Unit],
        packing: Packing,
        writes: Earlier,
        data: torch.Tensor,
        backend: Backend,
        stream: Stream,
        after: Event,
    ) -> Event | None:
        done: Event | None = None
        with backend.on(stream):
            stream.wait_event(after)
            for unit in units:
                slab = self._read(store, place, base, unit, self._slabs.reading.take(), writes)
                try:
                    packing.unpack((slab.data[: unit.packed_end - unit.packed_start],), data[unit.start : unit.end])
                finally:
                    # Also after an error, or the next to read would wait for it for ever.
                    done = stream.record_event()
                    self._slabs.reading.give_back(slab, after=done)
        return done

    # Ranges of host tensors.

    def write_range(self, store: Store, place: Place, data: memoryview, *, offset: int, after: Earlier) -> Future[None]:
        """Begin to write. The data is let go before the future is done, so that its memory is free for whoever waited."""
        self._count(store.write_link, len(data))
        held = [data]
        return self._writers.submit(self._run_after, after, store, lambda: store.write(place, held.pop(), offset=offset))

    def read_range(self, store: Store, place: Place, data: memoryview, *, offset: int, after: Earlier) -> Future[None]:
        self._count(store.read_link, len(data))
        return self._readers.submit(self._run_after, after, store, lambda: store.read(place, data, offset=offset))

    def _run_after(self, writes: Earlier, store: Store, run: Callable[[], None]) -> None:
        _wait_for(writes)
        with self._lanes.busy(store.lane):
            run()

    def _release(self, copy: StoredCopy) -> None:
        for future in copy.ahead.values():
            self._ahead.pop(future, None)
            future.add_done_callback(self._give_back_unread)
        pending: list[Future[Any]] = [*copy.writes, *copy.ahead.values(), *copy.fetches]
        pending = [future for future in pending if not future.done()]
        store, place = copy.store, copy.place
        if not pending:
            store.give_back(place)
        elif not self._is_closed:
            self._readers.submit(_give_back_after, pending, store, place)

    def _give_back_unread(self, future: Future[Slab]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._slabs.reading.give_back(future.result())


def _wait_for(writes: Earlier) -> None:
    for future in writes:
        future.result()


def _give_back_after(pending: Sequence[Future[Any]], store: Store, place: Place) -> None:
    for future in pending:
        future.exception()
    store.give_back(place)


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, the tensor kept alive by them."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"only contiguous tensors are written and read by range; this one has strides {tensor.stride()}"
        )
    flat = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,), (1,)
    )
    return host_view(flat)
