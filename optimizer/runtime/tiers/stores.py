"""The interface of a tier beyond the host: places for bytes that several threads write and read by range.

``disk.py`` keeps them in a scratch file, ``remote.py`` in another machine's memory.
"""

import threading
from typing import ClassVar, Protocol

from optimizer.base.categories import Lane, Link, Tier


class Place:
    """Room for ``num_bytes`` in a store."""

    __slots__ = ("index", "num_bytes")

    def __init__(self, index: int, num_bytes: int) -> None:
        self.index = index
        """The store's own way to find it: an offset, the number of a key."""
        self.num_bytes = num_bytes


class Store(Protocol):
    """Calls block and may come from any thread; different ranges may be written and read at the same time."""

    tier: ClassVar[Tier]
    write_link: ClassVar[Link]
    read_link: ClassVar[Link]
    lane: ClassVar[Lane]
    room: "Room"

    def take(self, num_bytes: int, *, is_made: bool = False) -> Place:
        """Room for so many bytes. is_made: all of it now, full of zeros, for what is written by ranges and stays.

        Raises DiskFull or RemoteStoreFull where that is known now, RemoteStoreLost.
        """
        ...

    def give_back(self, place: Place) -> None:
        """Its bytes are no longer needed; nothing may be on its way to or from it."""
        ...

    def write(self, place: Place, data: memoryview, *, offset: int) -> None: ...

    def read(self, place: Place, into: memoryview, *, offset: int) -> None: ...

    def close(self) -> None:
        """Leave nothing behind. Never raises."""
        ...


class Room:
    """Counts the bytes that are in use in a store, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.used_bytes = 0
        self.peak_bytes = 0
        """Most in use since the last ``reset_peak``."""

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.used_bytes
