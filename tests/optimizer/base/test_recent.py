"""The newest few are kept, and each is made once."""

import threading
from typing import Any

import pytest

from optimizer.base.recent import Recent


def test_the_value_asked_for_longest_ago_is_dropped() -> None:
    recent: Recent[Any, Any] = Recent(2)
    for key in ("a", "b", "a", "c"):
        recent.obtain(key, key.upper)
    assert [recent.get(key) for key in ("a", "b", "c")] == ["A", None, "C"]


def test_a_known_value_is_not_made_again() -> None:
    recent: Recent[Any, Any] = Recent(1)
    made: list[Any] = []
    for _ in range(2):
        recent.obtain("a", lambda: made.append(1) or 1)
    assert made == [1]


def test_a_caller_waits_for_a_value_that_another_thread_is_making() -> None:
    recent: Recent[Any, Any] = Recent(1)
    begun, may_end = threading.Event(), threading.Event()
    made: list[Any] = []

    def make() -> int:
        begun.set()
        assert may_end.wait(10)
        made.append(1)
        return 7

    found = []
    threads = [threading.Thread(target=lambda: found.append(recent.obtain("a", make))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert (found, made) == ([7, 7, 7], [1])


def test_a_value_that_could_not_be_made_is_made_for_the_next_caller() -> None:
    recent: Recent[Any, Any] = Recent(1)
    with pytest.raises(ZeroDivisionError):
        recent.obtain("a", lambda: 1 // 0)
    assert recent.obtain("a", lambda: 1) == 1
