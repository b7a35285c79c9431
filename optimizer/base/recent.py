"""A thread-safe cache of the values that were used last, and a function whose newest answers are remembered."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Asked = ParamSpec("Asked")


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

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()

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


class Remembered(Generic[Asked, V]):
    """A function that is asked the same question once; the newest answers are kept."""

    def __init__(self, ask: Callable[Asked, V], *, most: int, key: Callable[Asked, Hashable]) -> None:
        self._ask, self._key = ask, key
        self._kept: Recent[Hashable, V] = Recent(most)
        self.__doc__ = ask.__doc__

    def __call__(self, *args: Asked.args, **kwargs: Asked.kwargs) -> V:
        return self._kept.obtain(self._key(*args, **kwargs), lambda: self._ask(*args, **kwargs))

    def at_hand(self, *args: Asked.args, **kwargs: Asked.kwargs) -> V | None:
        """The answer where it was asked for before; None where it would have to be worked out."""
        return self._kept.get(self._key(*args, **kwargs))

    def forget(self) -> None:
        """Drop every answer."""
        self._kept.forget()


def remembered(*, most: int, key: Callable[Asked, Hashable]) -> Callable[[Callable[Asked, V]], Remembered[Asked, V]]:
    """Decorate a function of a question, so that its newest answers are kept in this process.

    most: answers. key: of the function's own arguments, what the answer rests on; questions alike in it have the same answer.
    """

    def wrap(ask: Callable[Asked, V]) -> Remembered[Asked, V]:
        return Remembered(ask, most=most, key=key)

    return wrap
