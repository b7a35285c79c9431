"""Marks stretches of a model's code whose products take less time to run again than they take memory to keep.

Selective recomputation keeps the results of products; inside such a stretch it keeps none. Torch-free.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


@contextmanager
def cheap_to_run_again() -> Iterator[None]:
    """The stretch, in this thread."""
    before = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(before)


def is_cheap_to_run_again() -> bool:
    return _is_inside.get()
