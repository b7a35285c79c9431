"""A memory of the newest few things, for several threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """What was asked for longest ago makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def obtain(self, key: K, make: Callable[[], V]) -> V:
        """Made outside the lock: of two threads that make the same at once the first one's is kept."""
        known = self.get(key)
        if known is not None:
            return known
        made = make()
        with self._lock:
            kept = self._kept.setdefault(key, made)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return kept
