"""Device memory that the caches of all blocks use one after the other, and the homes of those that live elsewhere.

front   what attention reads, where a cache is packed: unpacked for one block, then for the next; and what packing computes in.
slots   records as they come from their home, one slot for the block at work and one for each that comes ahead. A prompt uses
        the first alone; the others are made with the first token after it.

Both are as large as the largest block so far needs, are counted as ``kv_cache``, and go with the last cache that holds the
workspace. What runs on the compute stream is in order there; a slot is written to by compute only after what leaves it has left,
and read only after what comes has come.
"""

import contextlib
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from optimizer.plan.kv_cache import KvPlace
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.tiers.copies import Copy
from optimizer.runtime.tiers.homes import OffDeviceBytes
from optimizer.runtime.tiers.tiers import Tiers


class KvHomes:
    """Homes of blocks' caches. They stay as long as the tiers, and pass from one pass's caches to the next one's."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self._homes: dict[tuple[int, int], OffDeviceBytes] = {}
        self._room: HostRoom | None = None

    def take(self, num_bytes: int, *, turn: int, block: int, place: KvPlace) -> OffDeviceBytes:
        """The one that this block had for this turn, in place of which a larger one comes where it is too small.

        Raises OutOfHostMemory, DiskFull, RemoteStoreFull, RemoteStoreLost.
        """
        home = self._homes.get((turn, block))
        if home is None or home.num_bytes < num_bytes:
            if home is not None:
                del self._homes[turn, block]
                home.release()
            home = self._homes[turn, block] = OffDeviceBytes(self.tiers, num_bytes, place=place, category="kv_cache")
        return home

    def take_room(self, num_bytes: int) -> "HostRoom":
        """Host memory that all blocks use one after the other, at least so much. Raises OutOfHostMemory."""
        if self._room is None or self._room.data.numel() < num_bytes:
            # What it was goes first.
            self._room = None
            home = OffDeviceBytes(self.tiers, num_bytes, place="host", category="kv_cache")
            assert home.data is not None
            self._room = HostRoom(home.data)
        return self._room


class HostRoom:
    """Bytes on the host, and views of them that users keep from one token to the next, which go with it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.views: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        """By user."""


class Slot:
    """Records on the device, on their way there or from there."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        """Bytes."""
        self.coming: list[Copy] = []
        self._leaving: list[Copy] = []

    def arrive(self) -> None:
        """Compute that is queued from here on finds what was to come."""
        coming, self.coming = self.coming, []
        for copy in coming:
            copy.wait()

    def arrive_first(self) -> None:
        """The same of what was to come first, alone; ``arrive`` is still to be called."""
        self.coming[0].wait()

    def may_change(self) -> None:
        """Compute that is queued from here on may write: what leaves has left."""
        leaving, self._leaving = self._leaving, []
        for copy in leaving:
            copy.wait()

    def bring(self, tiers: Tiers, home: OffDeviceBytes, *, start: int, end: int, offset: int) -> None:
        """Bytes ``start`` to ``end`` of a home to the slot's from ``offset`` on; ``arrive`` before use."""
        target = self.data[offset : offset + end - start]
        if home.data is not None:
            self.coming.append(tiers.copy_to_device(home.data[start:end], target))
        else:
            assert home.stored is not None
            self.coming.append(tiers.load(home.stored, target, offset_bytes=start))

    def send(self, tiers: Tiers, home: OffDeviceBytes, *, start: int, end: int, offset: int) -> None:
        """The slot's bytes from ``start`` to ``end`` home, to ``offset`` there."""
        source = self.data[start:end]
        if home.data is not None:
            self._leaving.append(tiers.copy_to_host(source, home.data[offset : offset + end - start]))
        else:
            assert home.stored is not None
            tiers.save(source, home.stored, offset_bytes=offset)

    def __del__(self) -> None:
        # What was begun and never used must have come before its memory is handed out again.
        with contextlib.suppress(Exception):
            self.arrive()
            self.may_change()


class KvWorkspace:
    """The workspace of all caches that run together."""

    def __init__(self, *, device: torch.device, prefetch: int, meter: Meter | None) -> None:
        self._device = device
        self._num_slots = prefetch + 1
        self._meter = meter
        self._front: torch.Tensor | None = None
        self._slots: list[Slot] = []
        self._next = 0

    @property
    def front(self) -> torch.Tensor:
        """Bytes."""
        assert self._front is not None
        return self._front

    def make_front(self, num_bytes: int) -> None:
        """At least so large."""
        if num_bytes and (self._front is None or self._front.numel() < num_bytes):
            self._front = None
            self._front = self._make(num_bytes)

    def make_slot(self, num_bytes: int) -> None:
        """Each at least so large; none is in use."""
        if num_bytes and (not self._slots or self._slots[0].data.numel() < num_bytes):
            self._slots.clear()
            self._slots.append(Slot(self._make(num_bytes)))

    @property
    def first_slot(self) -> Slot:
        return self._slots[0]

    def take_slot(self) -> Slot:
        """They take turns: one is lent again when as many others have been as come ahead."""
        while len(self._slots) < self._num_slots:
            self._slots.append(Slot(self._make(self._slots[0].data.numel())))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self._num_slots
        return slot

    def _make(self, num_bytes: int) -> torch.Tensor:
        with nullcontext() if self._meter is None else self._meter.region("kv_cache"):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
