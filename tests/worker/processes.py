"""Questions and waits about living processes; shared by the tests of this folder and of the whole stack."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def is_alive(pid: int) -> bool:
    """A zombie has ended; in a container nobody may be there to reap it."""
    return _state_of(pid) not in "ZX"


def is_halted(pid: int) -> bool:
    """True for one that a signal has stopped and none has sent on."""
    return _state_of(pid) == "T"


def _state_of(pid: int) -> str:
    """The kernel's letter; X for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def parent_of(pid: int) -> int | None:
    """None for a process that has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def wait_for(condition: Callable[[], T], *, what: str, timeout_s: float = 30.0) -> T:
    """The condition's first true answer. The limit only stops a test that would hang for ever."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for: {what}")
        time.sleep(0.05)
    return answer
