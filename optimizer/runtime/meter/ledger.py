"""The bytes that live on each tier by category, as storages come, change category and go. The meter writes it.

A weak reference with a callback reports when a storage goes. What happens within a step can be noted for its timeline.
"""

import time
import weakref

import torch

from optimizer.base.categories import CATEGORIES, Tier
from optimizer.runtime.meter.timeline import MAX_TIMELINE_POINTS, TimelinePoint, cut_timeline

NUM_CATEGORIES = len(CATEGORIES)


class Allocation(weakref.ref[torch.UntypedStorage]):
    """One live storage. Slots below NUM_CATEGORIES are on the device, the rest on the host."""

    __slots__ = ("key", "num_bytes", "slot")
    key: int
    num_bytes: int
    slot: int


class Ledger:
    """The bytes that are live now. A class to inherit from: the meter's ops are too many for a call more for each."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Allocation] = {}
        """By the storage's address."""
        self._bytes = [0] * (2 * NUM_CATEGORIES)
        self._device_bytes = 0
        self._host_bytes = 0
        self._events: list[tuple[float, int, int]] | None = None
        self._events_start: tuple[float, list[int]] = (0.0, [])

    @property
    def device_bytes(self) -> int:
        return self._device_bytes

    @property
    def host_bytes(self) -> int:
        return self._host_bytes

    def bytes_by_category(self, *, tier: Tier = "device") -> dict[str, int]:
        """Live bytes now, every category named."""
        offset = 0 if tier == "device" else NUM_CATEGORIES
        return dict(zip(CATEGORIES, self._bytes[offset : offset + NUM_CATEGORIES], strict=True))

    # The timeline of one step.

    def start_timeline(self) -> None:
        """Begin to note every allocation and release."""
        self._events = []
        self._events_start = (time.perf_counter(), self._bytes[:])

    def take_events(self) -> list[tuple[float, int, int]]:
        """Stop noting; ``(time_s, slot, delta_bytes)`` of both tiers in order, as the benchmark compares them."""
        events, self._events = self._events or [], None
        return events

    def take_timeline(self, *, max_points: int = MAX_TIMELINE_POINTS) -> list[TimelinePoint]:
        """Stop noting; the device's highest moments in order, at most ``max_points``, the peak always among them."""
        events = self.take_events()
        start_s, levels = self._events_start
        return cut_timeline(events, start_s=start_s, levels=levels[:NUM_CATEGORIES], max_points=max_points)

    # What comes, moves and goes.

    def _come(self, storage: torch.UntypedStorage, slot: int, num_bytes: int) -> None:
        """The totals of the tiers are the meter's to raise, which compares them with its caps."""
        allocation = Allocation(storage, self._gone)
        allocation.key = storage._cdata
        allocation.num_bytes = num_bytes
        allocation.slot = slot
        self._live[allocation.key] = allocation
        self._bytes[slot] += num_bytes
        if self._events is not None:
            self._events.append((time.perf_counter(), slot, num_bytes))

    def _gone(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        allocation: Allocation = reference  # type: ignore[assignment]
        del self._live[allocation.key]
        slot = allocation.slot
        num_bytes = allocation.num_bytes
        self._bytes[slot] -= num_bytes
        if slot < NUM_CATEGORIES:
            self._device_bytes -= num_bytes
        else:
            self._host_bytes -= num_bytes
        if self._events is not None:
            self._events.append((time.perf_counter(), slot, -num_bytes))

    def _move(self, allocation: Allocation, slot: int) -> None:
        if allocation.slot == slot:
            return
        self._bytes[allocation.slot] -= allocation.num_bytes
        self._bytes[slot] += allocation.num_bytes
        if self._events is not None:
            now_s = time.perf_counter()
            self._events.append((now_s, allocation.slot, -allocation.num_bytes))
            self._events.append((now_s, slot, allocation.num_bytes))
        allocation.slot = slot
