"""Values that are made once and kept with what they were made of, in tables that know their keys' and values' types. Torch-free.

A search prices hundreds of plans of few shapes, so what plans share is kept with the shape that it belongs to. Modules above
the shape keep values there whose types it does not know: each declares a ``Table`` for them.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """Values of one type, each made when its key is first asked for."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[K, V] = {}

    def obtain(self, key: K, make: Callable[[], V]) -> V:
        """The value of this key, which is all that ``make`` may depend on beside the owner of the memo."""
        try:
            return self._values[key]
        except KeyError:
            pass
        made = self._values[key] = make()
        return made


class Memos:
    """The memos of one owner, by their tables; they go when it goes."""

    __slots__ = ("_by_table",)

    def __init__(self) -> None:
        self._by_table: dict[Table[Any, Any], Memo[Any, Any]] = {}

    def find(self, table: "Table[K, V]") -> Memo[K, V]:
        """The memo of a table; empty at first."""
        memo = self._by_table.get(table)
        if memo is None:
            memo = self._by_table[table] = Memo()
        return memo


class Owner(Protocol):
    """Whatever values are kept with: a shape, a list of tensors."""

    @property
    def memos(self) -> Memos: ...


class Table(Generic[K, V]):
    """Declares, once in a module, which values the module keeps with their owners."""

    __slots__ = ()

    def obtain(self, owner: Owner, key: K, make: Callable[[], V]) -> V:
        """The owner's value of this key; ``make`` may depend on the two alone."""
        return owner.memos.find(self).obtain(key, make)
