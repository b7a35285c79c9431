"""A thread-safe cache of the values that were used last."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps at most ``most`` values; the one that was asked for longest ago is dropped first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[K, threading.Lock] = {}

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def obtain(self, key: K, make: Callable[[], V]) -> V:
        """Return the kept value, or make it once: other threads that ask meanwhile wait for it. If ``make`` raises, the next
        caller makes the value anew.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            known = self.get(key)
            return known if known is not None else self._make(key, make)

    def _make(self, key: K, make: Callable[[], V]) -> V:
        try:
            made = make()
        except BaseException:
            with self._lock:
                self._making.pop(key, None)
            raise
        with self._lock:
            self._making.pop(key, None)
            self._kept[key] = made
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made
