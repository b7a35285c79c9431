"""A process group that ends with its supervisor, grandchildren included, even when the supervisor is killed with SIGKILL.

The supervisor holds the writing end of a pipe and never writes. The leader of the attempt's group asks the kernel to send
SIGKILL to the whole group when the reading end sees anything, and losing the last writer counts (fcntl(2), F_SETOWN, F_SETSIG,
O_ASYNC). ``PR_SET_PDEATHSIG`` alone would miss grandchildren, and fires when the *thread* that started the child ends, not
the process. It stays as the way out where the kernel refuses signal-driven pipes; both at once would race, and the leader
could be gone before the group is signalled.

A supervisor that is stopped, or whose machine slept, has not ended, and meanwhile its job is given to another. So it also writes,
into a page of memory and many times in a lease, the moment until which the group may work. Each process of the group that writes
what others see reads it by itself, so that it does not matter which of them are stopped as well: the first that finds the moment
passed ends the group. Nothing outside has to notice it, and it is over before the lease is.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10
"""Linux; the fcntl module has no name for it before Python 3.12."""
_BEAT = struct.Struct("=dd")
"""The moment twice: a reader that comes within a writing finds two."""
_SILENT = b"the supervisor is silent, and the job may be another's by now: this process ends\n"
_LOOK_S = 1.0
"""Between two looks at the page, whatever it said."""


def boot_s() -> float:
    """Seconds since the machine started, its sleep included; the same in every process of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Beats:
    """The supervisor's side of the page: a thread that passes on until when the group may work."""

    def __init__(self, until_s: Callable[[], float], *, interval_s: float) -> None:
        """until_s: by ``boot_s``; the past for a group that has to end. It must not wait for anything."""
        self._until_s = until_s
        self._interval_s = interval_s
        self.child_fd = os.memfd_create("headroom-beats", os.MFD_CLOEXEC)
        self._latest_s = float("inf")
        self._has_lapsed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._beat()  # before the process starts, so that it finds one

    def start(self) -> None:
        self._thread.start()

    @property
    def has_lapsed(self) -> bool:
        """Report whether the group may ever have found its time run out, and so have ended itself."""
        return self._has_lapsed or boot_s() > self._latest_s

    def close(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self.child_fd)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        self._has_lapsed = self.has_lapsed
        self._latest_s = self._until_s()
        os.pwrite(self.child_fd, _BEAT.pack(self._latest_s, self._latest_s), 0)


class WorkTime:
    """The time until which the group may work, as its supervisor last said; over means its end."""

    def __init__(self, beat_fd: int) -> None:
        self._beat_fd = beat_fd

    def watch(self) -> None:
        """Check when the time is over, and before, for ever."""
        while True:
            time.sleep(min(_LOOK_S, self.check()))

    def check(self) -> float:
        """The seconds that are left; ends the group if there are none. Some microseconds."""
        until_s, again_s = self._read()
        while until_s != again_s:
            until_s, again_s = self._read()
        left_s = until_s - boot_s()
        if left_s < 0:
            with contextlib.suppress(OSError):  # the log may lie on a disk that is full
                os.write(sys.stderr.fileno(), _SILENT)
            os.killpg(0, signal.SIGKILL)
        return max(0.0, left_s)

    def _read(self) -> tuple[float, float]:
        return _BEAT.unpack(os.pread(self._beat_fd, _BEAT.size, 0))


def end_when_silent(beat_fd: int) -> Callable[[], object]:
    """Start the thread by which the group ends itself; called by each process of it that writes what others could see.

    What holds Python's lock for long delays it and cannot mislead it: what was said meanwhile stands in the page. A process that
    was halted gets its threads back in any order, so the one that works calls what is returned before it writes.
    """
    time_left = WorkTime(beat_fd)
    threading.Thread(target=time_left.watch, name="lifeline", daemon=True).start()
    return time_left.check


def die_with_supervisor(lifeline_fd: int) -> None:
    """Called first thing by the leader of the group. Exits at once when the supervisor is gone already."""
    try:
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    except OSError:
        die_with_parent_thread()
    if _is_cut(lifeline_fd):
        sys.exit("the supervisor ended before the job's process had started")


def die_with_parent_thread() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _is_cut(lifeline_fd: int) -> bool:
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    return bool(poll.poll(0))
