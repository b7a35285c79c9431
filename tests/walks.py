"""Follows one value through the program as it runs: which files' functions are handed it, or something that holds it."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optimizer", "webapp", "worker", "headroom")
_DEPTH = 3
"""A budget lies in a goal, the goal in a spec or a question: what holds a value holds it at most so deep."""


class Walk:
    """The files that a value entered, in order, each once."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def enter(self, file: str) -> None:
        if file not in self.files:
            self.files.append(file)


@contextmanager
def follow(is_value: Callable[[Any], bool], *, until: Callable[[FrameType], bool] = lambda _: False) -> Iterator[Walk]:
    """Note each file of the program whose functions are called with the value, until a call for which ``until`` holds.

    A comprehension, a property of the value's own class and what dataclasses generate are no stations of their own.
    """
    walk = Walk()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := _file_of(frame)) is None:
            return
        code = frame.f_code
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if any(_holds(argument, is_value, _DEPTH) for argument in arguments):
            walk.enter(file)
        if until(frame):
            sys.setprofile(None)

    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def _file_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT)
    return file.as_posix() if file.parts[0] in PACKAGES and not frame.f_code.co_name.startswith("<") else None


def _holds(candidate: Any, is_value: Callable[[Any], bool], depth: int) -> bool:
    if is_value(candidate):
        return True
    return depth > 0 and any(_holds(part, is_value, depth - 1) for part in _parts(candidate))


def _parts(candidate: Any) -> Iterable[Any]:
    if isinstance(candidate, Mapping):
        return candidate.values()
    if is_dataclass(candidate):
        return [getattr(candidate, field.name, None) for field in fields(candidate)]
    return ()
