"""Notices a process that stands still because something halted it (SIGSTOP), from the side of the one that started it.

A halted process ends by nothing of its own, and those that wait for it wait as long as they have patience. A debugger's stop is
another state and not meant. Reads ``/proc``; where there is none, nothing is noticed.
"""

import time
from pathlib import Path
from typing import Final

HALTED_S: Final = 10.0
"""Time for which a process may stand still: longer than a person's slip, far shorter than ranks wait for each other."""
_LOOK_S: Final = 0.5
_STOPPED: Final = "T"


class HaltWatch:
    """Watches one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_s: float | None = None
        self._next_s = 0.0

    def has_stood_still(self) -> bool:
        """Report whether it has been found halted at every look of the last ``HALTED_S``; ask again and again."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOOK_S
            self._since_s = (self._since_s or now_s) if _is_halted(self._pid) else None
        return self._since_s is not None and now_s - self._since_s >= HALTED_S


def _is_halted(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == _STOPPED
    except (OSError, IndexError):
        return False
