"""Lets one backup or restore at a time write a folder: a second one would clear away what the first has copied."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from worker.stack.backup.contents import BackupError


@contextmanager
def written_alone(folder: Path) -> Iterator[Path]:
    """Yield ``NAME.part`` beside the folder, new and empty, for this process alone. Raises BackupError while another one has it.

    The lock is a file, since a network's file system may not lock folders, and ends with the process however that ends.
    """
    lock, partial = (folder.with_name(f"{folder.name}{ending}") for ending in (".lock", ".part"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        if not _take(file, lock):
            raise BackupError(
                f"another backup or restore is writing {folder} at present", hint="Wait for its end, or give another folder."
            )
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            yield partial
        finally:
            lock.unlink(missing_ok=True)


def _take(file: IO[str], path: Path) -> bool:
    """False also for a file whose holder ended just now and took it away: the next one would lock another of the same name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
