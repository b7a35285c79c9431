"""Traces the representations of a model's weights side by side, in copies of this process.

A trace is Python code from end to end, so threads would only wait for each other. A copy has everything that was imported.
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from optimizer.profile.profile import Profile

_PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""
T = TypeVar("T")


def map_in_copies(trace: Callable[[T], Profile], items: Sequence[T], *, num_processes: int) -> list[Profile]:
    """Return ``trace`` of each item, in order. Raises what ``trace`` raises.

    num_processes: among which the items are shared out. With more than one, no other thread may run here: a copy has none.
    """
    num_parts = max(min(num_processes, len(items)), 1)
    copies = [_Copy(trace, items, range(part, len(items), num_parts)) for part in range(1, num_parts)]
    try:
        found = {index: trace(items[index]) for index in range(0, len(items), num_parts)}
        for copy in copies:
            found |= copy.read()
    finally:
        for copy in copies:
            copy.end()
    # What failed in a copy is tried again here, where its error can be raised.
    return [found[index] if index in found else trace(item) for index, item in enumerate(items)]


class _Copy:
    """A copy of this process that traces some of the items and writes their profiles to a pipe."""

    def __init__(self, trace: Callable[[T], Profile], items: Sequence[T], indices: Sequence[int]) -> None:
        libc, parent = ctypes.CDLL(None), os.getpid()
        read_fd, write_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() == parent:
                    documents = {index: trace(items[index]).to_json() for index in indices}
                    with os.fdopen(write_fd, "w") as pipe:
                        json.dump(documents, pipe)
            finally:
                os._exit(0)  # nothing of what the original has begun is this process's to end
        os.close(write_fd)
        self._pipe = os.fdopen(read_fd)

    def read(self) -> dict[int, Profile]:
        """Read the profiles, by item; none where the copy failed."""
        try:
            documents: dict[str, Any] = json.load(self._pipe)
        except ValueError:
            return {}
        return {int(index): Profile.from_json(document) for index, document in documents.items()}

    def end(self) -> None:
        """End the copy at once, whatever it does."""
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
