"""Reports the progress of a long command on standard error: a line that is rewritten on a terminal, in a log a line now
and then."""

import sys
from types import TracebackType
from typing import Self

_LOGGED_EVERY = 10
_CLEAR = "\r\x1b[K"
"""To the start of the line, and nothing behind."""


class ProgressLine:
    """Called before each of many: how many are done, of how many, and what is next. Leaves nothing behind on a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, num_done: int, num_all: int, name: str) -> None:
        if self._is_terminal:
            print(f"{_CLEAR}{num_done + 1} of {num_all} {self._what}: {name}", end="", file=sys.stderr, flush=True)
        elif num_done % _LOGGED_EVERY == 0:
            print(f"{num_done} of {num_all} {self._what} done", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_terminal:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
