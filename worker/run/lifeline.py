"""A process group that ends with its supervisor, grandchildren included, even when the supervisor is killed with SIGKILL.

The supervisor holds the writing end of a pipe and never writes. The leader of the attempt's group asks the kernel to send
SIGKILL to the whole group when the reading end sees anything, and losing the last writer counts (fcntl(2), F_SETOWN, F_SETSIG,
O_ASYNC). ``PR_SET_PDEATHSIG`` alone would miss grandchildren, and fires when the *thread* that started the child ends, not
the process. It stays as the way out where the kernel refuses signal-driven pipes; both at once would race, and the leader
could be gone before the group is signalled.
"""

import ctypes
import fcntl
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
"""Linux; the fcntl module has no name for it before Python 3.12."""


def die_with_supervisor(lifeline_fd: int) -> None:
    """Called first thing by the leader of the group. Exits at once when the supervisor is gone already."""
    try:
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    except OSError:
        _die_with_parent_thread()
    if _is_cut(lifeline_fd):
        sys.exit("the supervisor ended before the job's process had started")


def _die_with_parent_thread() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _is_cut(lifeline_fd: int) -> bool:
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    return bool(poll.poll(0))
