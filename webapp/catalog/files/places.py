"""The places in which files are checked: few at once on this machine, and one for each person, whatever the number of requests.

A check may take a gigabyte and minutes, and each request has a thread of its own, so nothing else bounds how many run. A place is
a locked file: it holds across the processes of a web server, and a process that dies gives its places back.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from django.conf import settings

from webapp.catalog.errors import ChecksBusy

MAX_CHECKS = 2
"""At once, of everybody."""
WAIT_S = 2.0
"""A request waits so long for a place; a usual check takes less."""
_POLL_S = 0.05


@contextmanager
def take_place(owner_id: int | None, *, wait_s: float = WAIT_S) -> Iterator[tuple[int, ...]]:
    """Descriptors of the locks, for the process that checks: the place is taken for as long as that lives.

    owner_id: whose file it is; None for what ships with the program. Raises ChecksBusy.
    """
    deadline = time.monotonic() + wait_s
    with ExitStack() as held:
        own = () if owner_id is None else (f"person-{owner_id}",)
        own_lock = _take_one(held, own, deadline=deadline, found="another file of the same person is being checked")
        any_of = tuple(f"place-{number}" for number in range(MAX_CHECKS))
        place = _take_one(held, any_of, deadline=deadline, found=f"{MAX_CHECKS} files are being checked, as many as go at once")
        yield (*own_lock, *place)


def _take_one(held: ExitStack, names: tuple[str, ...], *, deadline: float, found: str) -> tuple[int, ...]:
    """The lock of the first name that is free; none where no name is given."""
    while names:
        for name in names:
            lock = (_folder() / name).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            held.enter_context(lock)
            return (lock.fileno(),)
        if time.monotonic() > deadline:
            raise ChecksBusy(found)
        time.sleep(_POLL_S)
    return ()


def _folder() -> Path:
    folder = Path(settings.HEADROOM_HOME) / "checks"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
