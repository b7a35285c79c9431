"""Makes a backup while jobs run.

Files are copied first, then the database at one moment, then the files that have come or changed since: whatever a row of the
copy names was there at that moment, so it is in one of the two passes unless it was deleted within the second, short one.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from optimizer.base.units import format_bytes
from worker.stack.backup.alone import written_alone
from worker.stack.backup.contents import BACKUP_VERSION, HOME_FOLDER, BackupError, Contents, Entry, list_files
from worker.stack.backup.database import copy_database, database_kind

_PIECE_BYTES = 1 << 20
_Known = dict[str, tuple[tuple[int, int], Entry]]


def make_backup(home: Path, folder: Path, *, say: Callable[[str], None] = lambda _: None) -> Contents:
    """Copy a home's database and files into a new folder. Raises BackupError, and OSError where the disk is full.

    Nothing of the name is there until it is whole.
    """
    home, folder = home.resolve(), folder.absolute()
    if folder.is_relative_to(home):
        raise BackupError(f"{folder} lies in HEADROOM_HOME, {home}", hint="Give a folder elsewhere, best on another disk.")
    with written_alone(folder) as partial:
        if folder.exists():
            partial.rmdir()
            raise BackupError(f"{folder} is there already", hint="Give a folder that is not there yet.")
        contents = _fill(home, partial, say=say)
        contents.write(partial)
        _require_all(contents, partial)
        os.sync()
        partial.rename(folder)
    return contents


def _fill(home: Path, partial: Path, *, say: Callable[[str], None]) -> Contents:
    _require_room(home, partial)
    known: _Known = {}
    _copy_files(home, partial, known)
    say(f"{len(known):,} files copied, {format_bytes(sum(entry.num_bytes for _, entry in known.values()))}")
    copy = copy_database(home, partial)
    copy.chmod(0o600)
    _copy_files(home, partial, known)
    database = Entry(path=copy.name, num_bytes=copy.stat().st_size, sha256=sha256_of(copy))
    return Contents(
        version=BACKUP_VERSION,
        program=version("headroom"),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        database=database_kind(),
        entries=(database, *(known[path][1] for path in sorted(known))),
    )


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _require_room(home: Path, partial: Path) -> None:
    needed_bytes = sum(size for size, _ in filter(None, map(_stamp, list_files(home))))
    free_bytes = shutil.disk_usage(partial).free
    if needed_bytes > free_bytes:
        partial.rmdir()
        raise BackupError(
            f"the files take {format_bytes(needed_bytes)}; {partial.parent} has {format_bytes(free_bytes)} free",
            hint="Give a folder on a larger disk.",
        )


def _require_all(contents: Contents, partial: Path) -> None:
    """Raises BackupError where a file that was copied is gone, taken away by whoever cleared the folder."""
    for entry in contents.entries:
        if not entry.link_to and not (partial / entry.path).is_file():
            raise BackupError(f"{entry.path} was copied into {partial} and is gone from it", hint="Take the backup again.")


def _stamp(file: Path) -> tuple[int, int] | None:
    """Size and time of change; None for what has vanished."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _copy_files(home: Path, partial: Path, known: _Known) -> None:
    for file in list_files(home):
        name = f"{HOME_FOLDER}/{file.relative_to(home).as_posix()}"
        stamp = _stamp(file)
        if stamp is None or (name in known and known[name][0] == stamp):
            continue
        entry = _copy(file, partial / name, name)
        if entry is not None:
            known[name] = stamp, entry


def _copy(file: Path, target: Path, name: str) -> Entry | None:
    """None for what vanished before its turn."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if file.is_symlink():
            return Entry(path=name, link_to=str(file.readlink()))
        digest, num_bytes = hashlib.sha256(), 0
        with file.open("rb") as source, target.open("wb") as out:
            target.chmod(0o600)
            while piece := source.read(_PIECE_BYTES):
                digest.update(piece)
                out.write(piece)
                num_bytes += len(piece)
    except FileNotFoundError:
        return None
    return Entry(path=name, num_bytes=num_bytes, sha256=digest.hexdigest())
