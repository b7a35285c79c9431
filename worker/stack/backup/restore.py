"""Puts a backup back, into a home that is empty, on this machine or another.

Jobs that ran when it was made are running in its rows, under leases that have passed: the reconciler gives them back as those of
a lost worker, and they go on from their newest checkpoint. Nothing of the home is there until everything was checked.
"""

import shutil
from pathlib import Path

from optimizer.base.units import format_bytes
from worker.stack.backup.alone import written_alone
from worker.stack.backup.contents import DATABASE_FILES, HOME_FOLDER, BackupError, Contents, Entry, read_contents
from worker.stack.backup.database import require_empty_database, restore_database
from worker.stack.backup.make import sha256_of


def restore_backup(folder: Path, home: Path) -> Contents:
    """Check every file against the backup's list and copy it into the home. Raises BackupError, and OSError of a full disk."""
    contents = read_contents(folder)
    with written_alone(home) as partial:
        try:
            _require_empty(home)
            require_empty_database(contents.database)
            _require_room(contents, home.parent)
            _copy_all(folder, contents, partial)
            # links last: nothing is ever written through one
            for entry in contents.entries:
                if entry.link_to:
                    _place(partial, entry).symlink_to(entry.link_to)
            restore_database(folder / DATABASE_FILES[contents.database], partial, contents.database)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if home.exists():
            home.rmdir()
        partial.rename(home)
    return contents


def _require_empty(home: Path) -> None:
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise BackupError(
            f"{home} is not empty; a backup is put into an empty folder only",
            hint="Name another one with --into, or move this one away.",
        )


def _require_room(contents: Contents, parent: Path) -> None:
    free_bytes = shutil.disk_usage(parent).free
    if contents.num_bytes > free_bytes:
        needed, free = format_bytes(contents.num_bytes), format_bytes(free_bytes)
        raise BackupError(f"the backup takes {needed}; {parent} has {free} free")


def _copy_all(folder: Path, contents: Contents, partial: Path) -> None:
    for entry in contents.entries:
        if entry.link_to:
            continue
        source = folder / entry.path
        if source.is_symlink() or not source.is_file():
            raise BackupError(f"{entry.path} is not in the backup", hint="It is not whole; take another one.")
        if entry.path.startswith(f"{HOME_FOLDER}/"):
            target = _place(partial, entry)
            shutil.copyfile(source, target)
            target.chmod(0o600)
        else:
            target = source
        if target.stat().st_size != entry.num_bytes or sha256_of(target) != entry.sha256:
            raise BackupError(f"{entry.path} is not what was backed up: its bytes differ", hint="Take another backup.")


def _place(partial: Path, entry: Entry) -> Path:
    place = partial / entry.path.removeprefix(f"{HOME_FOLDER}/")
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place
