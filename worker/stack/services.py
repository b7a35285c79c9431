"""Keeps a handful of child processes running: starts them, restarts what dies, ends them in order.

A child that something has halted (SIGSTOP) and left so is ended, and started again like one that died: on SQLite it may hold the
lock that every other process waits for. So is a web server that runs and answers nobody; Python says first in its log what each
of its threads was doing.

Nothing that the disk refuses ends it: a service whose log cannot be opened runs without one, a program that cannot be started is
tried again like one that died, and what cannot be noted is noted later.

Single-threaded on purpose: a child asks the kernel to be killed when the thread that started it ends, and here that thread is the
process. So no child outlives this one, whatever kills it.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from worker.run.watch.halted import HaltWatch
from worker.stack import answering
from worker.stack.answering import AnswerWatch

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
STEADY_AFTER_S = 30.0
"""A child that has run this long starts again at the first back-off."""
YOUNG_S = 5.0
"""A child that has died sooner may have been unable to live with what it finds on the disk."""
NUM_YOUNG_DEATHS = 3
"""In succession; then what it keeps is set aside."""
_LAST_WORDS_S = 5.0
"""From ABRT to KILL."""
LARGEST_LOG_BYTES = 20 * 1024 * 1024
"""A log that is longer is set aside, one old copy is kept."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Service:
    """One child process that is always to run."""

    name: str
    command: Sequence[str]
    stop_s: float
    """From TERM to KILL."""
    set_aside: Callable[[], None] | None = None
    """Sets aside what it keeps on the disk, called where it dies young again and again; None where that cannot be spared."""
    address: tuple[str, int] | None = None
    """Host and port of a web server, which is to answer; None for other services."""


@dataclass(kw_only=True)
class RunningService:
    """A service and the process that carries it now, if one does."""

    service: Service
    environment: Mapping[str, str]
    folder: Path
    log_file: Path
    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    num_restarts: int = 0
    num_young_deaths: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    start_again_at: float = field(default=0.0)
    halts: HaltWatch | None = None
    """Watches the process."""
    answers: AnswerWatch | None = None
    """Asks it, where it is a web server."""
    kill_at: float | None = None
    """When a process that was asked to say what it does and end is killed."""

    def tend(self, now: float) -> Literal["started", "died", ""]:
        """Start it when it is due, notice when it has died. Returns what happened."""
        if self.process is None:
            if now < self.start_again_at:
                return ""
            try:
                self._start(now)
            except OSError:  # no memory for another process, no program in its place for the moment
                return self._wait_for_next_start(now)
            return "started"
        if self.process.poll() is None:
            _set_aside(self.log_file)
            self._end_if_halted()
            self._end_if_silent(now)
            return ""
        if now - self.started_at >= STEADY_AFTER_S:
            self.backoff_s = FIRST_BACKOFF_S
        self._count_young_death(now - self.started_at)
        self.process = self.kill_at = None
        if self.answers is not None:
            self.answers.close()
        return self._wait_for_next_start(now)

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # one that was halted could not obey

    def wait_stopped(self, deadline: float) -> None:
        """Until it is gone; killed with all of its group at the deadline."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill_group(self.process.pid)
            self.process.wait()

    def _end_if_halted(self) -> None:
        """Its death is noticed at the next turn."""
        if self.process is not None and self.halts is not None and self.halts.has_stood_still():
            _say(f"{self.service.name} ({self.process.pid}) was halted, and is ended")
            self.process.kill()

    def _end_if_silent(self, now: float) -> None:
        """With ABRT, on which Python's faulthandler writes what each thread does, whatever keeps them."""
        if self.process is None or self.answers is None:
            return
        if self.kill_at is not None and now >= self.kill_at:
            self.process.kill()
        elif self.kill_at is None and self.answers.is_silent(now):
            pid, silent_s = self.process.pid, answering.SILENT_S
            _say(f"{self.service.name} ({pid}) has answered nobody for {silent_s:.0f} s, and is ended; its log says what it did")
            self.process.send_signal(signal.SIGABRT)
            self.kill_at = now + _LAST_WORDS_S

    def _count_young_death(self, lived_s: float) -> None:
        self.num_young_deaths = self.num_young_deaths + 1 if lived_s < YOUNG_S else 0
        if self.service.set_aside is not None and self.num_young_deaths == NUM_YOUNG_DEATHS:
            self.num_young_deaths = 0
            with contextlib.suppress(OSError):  # it dies again, and this is tried again
                self.service.set_aside()

    def _wait_for_next_start(self, now: float) -> Literal["died"]:
        self.num_restarts += 1
        self.start_again_at = now + self.backoff_s
        self.backoff_s = min(LONGEST_BACKOFF_S, 2 * self.backoff_s)
        return "died"

    def _start(self, now: float) -> None:
        with _open_log(self.log_file) as log:
            self.process = subprocess.Popen(
                self.service.command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session, so that Ctrl-C reaches the supervisor alone and children end in order.
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        self.halts = HaltWatch(self.process.pid)
        if self.service.address is not None:
            host, port = self.service.address
            self.answers = AnswerWatch(host=host, port=port)
        self.started_at = now

    def _kill_group(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def run_services(
    services: Sequence[RunningService], *, on_change: Callable[[Sequence[RunningService]], None]
) -> None:
    """Keep them running until TERM or INT, then end them last to first. Main thread only.

    on_change: called after each start and death, and again at every turn while it raises OSError.
    """
    is_noted = True
    with _stop_signals() as stop:
        while not stop.is_asked():
            happened = [running.tend(time.monotonic()) for running in services]
            if any(happened) or not is_noted:
                is_noted = _is_noted(services, on_change)
            stop.wait(timeout_s=0.5)
        stop_services(services)


def stop_services(services: Sequence[RunningService]) -> None:
    """One after the other, last to first, so that a worker can still reach what it needs while it saves."""
    for running in reversed(services):
        running.ask_to_stop()
        running.wait_stopped(time.monotonic() + running.service.stop_s)


def _is_noted(
    services: Sequence[RunningService], on_change: Callable[[Sequence[RunningService]], None]
) -> bool:
    try:
        on_change(services)
    except OSError:
        return False
    return True


class _Stop:
    """Notes TERM and INT, and offers a wait that ends when one comes."""

    def __init__(self, wakeup_fd: int) -> None:
        self._wakeup_fd = wakeup_fd
        self._asked = False

    def ask(self, *_: object) -> None:
        self._asked = True

    def is_asked(self) -> bool:
        return self._asked

    def wait(self, *, timeout_s: float) -> None:
        if select.select([self._wakeup_fd], [], [], timeout_s)[0]:
            os.read(self._wakeup_fd, 512)


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    stop = _Stop(reader)
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # a death ends the wait
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """A function to run in a new child, which then ends when this process does, even if that is killed."""

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)

    return in_child


def _say(line: str) -> None:
    """Write a line to the output, without ``print``, which would keep what it could not write and fail again at the exit."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _open_log(log_file: Path) -> IO[bytes]:
    """A service whose log the disk refuses to open runs without one: better than not at all."""
    try:
        _set_aside(log_file)
        return log_file.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _set_aside(log_file: Path) -> None:
    """Copy the log and empty it, since its service goes on writing into the same file; lines of that instant may be lost."""
    with contextlib.suppress(FileNotFoundError):
        if log_file.stat().st_size <= LARGEST_LOG_BYTES:
            return
        with contextlib.suppress(OSError):  # no room for the copy: then all the more
            shutil.copyfile(log_file, log_file.with_suffix(".log.1"))
        os.truncate(log_file, 0)
