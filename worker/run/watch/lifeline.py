"""A process group that ends with its supervisor, grandchildren included, even when the supervisor is killed with SIGKILL.

The supervisor holds the writing end of a pipe and never writes. The leader of the attempt's group asks the kernel to send
SIGKILL to the whole group when the reading end sees anything, and losing the last writer counts (fcntl(2), F_SETOWN, F_SETSIG,
O_ASYNC). ``PR_SET_PDEATHSIG`` alone would miss grandchildren, and fires when the *thread* that started the child ends, not
the process. It stays as the way out where the kernel refuses signal-driven pipes; both at once would race, and the leader
could be gone before the group is signalled.

A supervisor that is stopped, or whose machine slept, has not ended, and meanwhile its job is given to another. So it also writes,
to a second pipe and many times in a lease, the moment until which the group may work. The group ends itself when the last one it
read has passed: nothing outside has to notice it, and it is over before the lease is.
"""

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
_BEAT = struct.Struct("=d")


def boot_s() -> float:
    """Seconds since the machine started, its sleep included; the same in every process of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Beats:
    """The supervisor's side of the second pipe: a thread that passes on until when the group may work."""

    def __init__(self, until_s: Callable[[], float], *, interval_s: float) -> None:
        """until_s: by ``boot_s``; the past for a group that has to end. It must not wait for anything."""
        self._until_s = until_s
        self._interval_s = interval_s
        self.child_fd, self._fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
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
        os.close(self._fd)
        os.close(self.child_fd)

    def _run(self) -> None:
        while not self._ending.wait(self._interval_s):
            self._beat()

    def _beat(self) -> None:
        self._has_lapsed = self.has_lapsed
        self._latest_s = self._until_s()
        try:
            os.write(self._fd, _BEAT.pack(self._latest_s))
        except (BlockingIOError, BrokenPipeError):
            return  # the process is halted and has thousands to read, or has ended


class WorkTime:
    """The time until which the group may work, as its leader last heard; over means its end."""

    def __init__(self, beat_fd: int) -> None:
        os.set_blocking(beat_fd, False)
        self._beat_fd = beat_fd
        self._until_s = boot_s()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Check at each beat and when the time is over, for ever."""
        poll = select.poll()
        poll.register(self._beat_fd, select.POLLIN)
        while True:
            poll.poll(max(0.0, min(1.0, self._until_s - boot_s())) * 1000)
            self.check()

    def check(self) -> None:
        """Hear the beats that have come, and end the group if its time is over. Some microseconds."""
        with self._lock:
            try:
                beats = os.read(self._beat_fd, 1 << 20)
            except BlockingIOError:
                beats = None
            if beats:
                (self._until_s,) = _BEAT.unpack(beats[-_BEAT.size :])  # each is written whole
            if beats == b"" or boot_s() > self._until_s:
                text = b"the supervisor is silent, and the job may be another's by now: this process ends\n"
                os.write(sys.stderr.fileno(), text)
                os.killpg(0, signal.SIGKILL)


def end_when_silent(beat_fd: int) -> Callable[[], None]:
    """Start the thread by which the group ends itself; called by its leader, after ``die_with_supervisor``.

    What holds Python's lock for long delays it and cannot mislead it: beats wait in the pipe. A process that was halted gets its
    threads back in any order, so the one that works calls what is returned before it writes anything that others could see.
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
