"""Names this web process, and reports whether a named one still lives, by a lock that ends with it.

Each process locks a file of its own below ``HEADROOM_HOME/run``. The system lets go of it at any death, also by SIGKILL, and no
name is used again as process ids are; containers that share the folder see each other's.
"""

import contextlib
import fcntl
import os
import secrets
import time
from functools import cache
from pathlib import Path

from django.conf import settings

_PATTERN = "web-*.lock"
_KEPT_S = 24 * 3600.0


def this_process() -> str:
    """The name under which this process lives; made with its lock at the first call."""
    return _lock(_folder(), os.getpid())


def is_dead(name: str) -> bool:
    """True only for a process whose lock is free; one of another host's folder counts as alive."""
    if not name or name == this_process():
        return False
    return _is_free(_folder() / f"{name}.lock")


def _folder() -> Path:
    return Path(settings.HEADROOM_HOME) / "run"


@cache
def _lock(folder: Path, pid: int) -> str:
    """The descriptor is never closed, so the lock is held for as long as the process lives. pid: a forked one gets its own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_old(folder)
    name = f"web-{pid}-{secrets.token_hex(8)}"
    descriptor = os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return name


def _remove_old(folder: Path) -> None:
    """Remove the files of processes that died, once nobody asks for them any more."""
    for path in folder.glob(_PATTERN):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S and _is_free(path):
                path.unlink()


def _is_free(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
