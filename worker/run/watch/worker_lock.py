"""Shows the workers of one machine which of them are gone, together with everything that they had started.

Each worker holds a ``flock`` on a file of its own, and the processes of its attempts inherit it. The kernel lets go of it when
the last of them has ended, however they ended, and not before: not while one is halted, and not because a number of a process
was given to another. So whoever gets the lock knows that nothing of that worker is left that could write. Files are named after
the boot of the machine, since another machine's locks may not be seen on a shared disk.
"""

import fcntl
import hashlib
import os
import platform
from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote, unquote

_SUFFIX = ".lock"
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class WorkerLock:
    """The lock of this process. ``begin`` it before anything is claimed under the worker's name."""

    def __init__(self, home: Path, *, worker: str) -> None:
        """worker: a name that no other process has or had."""
        self._file = home / "run" / f"{_prefix()}{quote(worker, safe='')}{_SUFFIX}"
        self._fd: int | None = None

    @property
    def fds(self) -> list[int]:
        """For the processes of attempts to inherit; empty before it has begun."""
        return [] if self._fd is None else [self._fd]

    def begin(self) -> None:
        """Take the lock, once. Raises OSError where the disk takes no file."""
        if self._fd is not None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = self._file.with_suffix(".new")
        fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            staged.rename(self._file)  # locked before it has its name, or others could find it free
        except OSError:
            os.close(fd)
            raise
        self._fd = fd


def gone_workers(home: Path, *, host: str) -> Generator[str, None, None]:
    """Names of workers of this host, ``HOST:...``, that are gone from this machine since its start, with all of their processes.

    Each is kept from others while it is looked at, and is not found again once the next one was asked for.
    """
    for path in sorted((home / "run").glob(f"{_prefix()}{quote(host, safe='')}%3A*{_SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield unquote(path.name.removeprefix(_prefix()).removesuffix(_SUFFIX))
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue  # it lives, or something that it started, or it is being looked at
        finally:
            os.close(fd)


def boot_id() -> str:
    """Eight characters that all containers of a host see and no other host has; a host name has neither quality."""
    try:
        return _BOOT_ID_FILE.read_text().strip()[:8]
    except OSError:
        return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _prefix() -> str:
    return f"worker-{boot_id()}-"
