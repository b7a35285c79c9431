"""Tables of what plans share: made once for an owner and a key, apart by table, gone with the owner."""

import gc
import weakref
from dataclasses import dataclass, field

from optimizer.estimate.memo import Memos, Table


@dataclass
class _Shape:
    memos: Memos = field(default_factory=Memos)


class _Made:
    pass


def test_value_is_made_once_for_each_owner_and_key() -> None:
    table: Table[int, _Made] = Table()
    first, second = _Shape(), _Shape()
    made = table.obtain(first, 1, _Made)
    assert table.obtain(first, 1, _Made) is made
    assert table.obtain(first, 2, _Made) is not made
    assert table.obtain(second, 1, _Made) is not made


def test_tables_with_equal_keys_do_not_meet() -> None:
    numbers: Table[int, int] = Table()
    words: Table[int, str] = Table()
    owner = _Shape()
    assert numbers.obtain(owner, 1, lambda: 5) == 5
    assert words.obtain(owner, 1, lambda: "five") == "five"


def test_none_is_a_value_too() -> None:
    table: Table[None, None] = Table()
    owner, calls = _Shape(), []
    for _ in range(2):
        assert table.obtain(owner, None, lambda: calls.append(1)) is None
    assert len(calls) == 1


def test_values_go_with_their_owner() -> None:
    table: Table[int, _Made] = Table()
    owner = _Shape()
    made = weakref.ref(table.obtain(owner, 1, _Made))
    del owner
    gc.collect()
    assert made() is None
