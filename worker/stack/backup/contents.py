"""Says what is in a backup, and keeps its list of files.

A backup is a folder: ``database.sqlite3`` or ``database.dump``, below ``home/`` the files that rows name, at the same places as
in HEADROOM_HOME, and ``headroom-backup.json`` with the size and the sha256 of each. Left out is what is made anew: logs, caches,
static files, sockets, unfinished uploads, checkpoints that are being written.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.base.serialize import from_json, to_json

BACKUP_VERSION = 1
LIST_FILE = "headroom-backup.json"
HOME_FOLDER = "home"
DatabaseKind = Literal["sqlite", "postgresql"]
DATABASE_FILES: dict[DatabaseKind, str] = {"sqlite": "database.sqlite3", "postgresql": "database.dump"}
_FOLDERS = ("models", "datasets", "jobs")
_FILES = ("secret_key", "cli.json", "cache/machine-*.json")
_BEING_WRITTEN = ".tmp-"
_CHANGED = "It is damaged or was changed; take another backup."


class BackupError(HeadroomError):
    """A backup cannot be made or put back; one line says why."""

    code = "backup_error"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a backup, or a link to a file that is not the service's own."""

    path: str
    """Within the backup, with slashes."""
    num_bytes: int = 0
    sha256: str = ""
    link_to: str = ""
    """A linked model's file: only the link is kept."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The list of a backup's files."""

    version: int
    program: str
    """The version of Headroom that made it."""
    made_at: str
    database: DatabaseKind
    entries: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    def write(self, folder: Path) -> None:
        (folder / LIST_FILE).write_text(json.dumps(to_json(self), indent=1))


def read_contents(folder: Path) -> Contents:
    """Raises BackupError for what is no backup, or one that this program cannot read."""
    file = folder / LIST_FILE
    try:
        document: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise BackupError(f"{folder} is no backup: {LIST_FILE} is not there", hint="Give the folder that backup made.") from None
    except (OSError, ValueError) as error:
        raise BackupError(f"{file} cannot be read: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > BACKUP_VERSION:
        raise BackupError(
            f"the backup was made by Headroom {document.get('program')} in form {version}; this program reads forms to "
            f"{BACKUP_VERSION}",
            hint="Restore it with that version, or a newer one.",
        )
    try:
        contents = from_json(Contents, document, path=LIST_FILE)
    except InvalidInput as error:
        raise BackupError(error.message, hint=_CHANGED) from error
    for entry in contents.entries:
        _check_path(entry, contents.database)
    if not any(entry.path == DATABASE_FILES[contents.database] for entry in contents.entries):
        raise BackupError(f"{file} names no database", hint=_CHANGED)
    return contents


def _check_path(entry: Entry, database: DatabaseKind) -> None:
    path = PurePosixPath(entry.path)
    is_plain = str(path) == entry.path and not path.is_absolute() and ".." not in path.parts and "\0" not in entry.path
    if is_plain and (entry.path == DATABASE_FILES[database] or _is_kept(path)):
        return
    raise BackupError(f"{LIST_FILE} names {entry.path!r:.120}, which no backup has", hint=_CHANGED)


def _is_kept(path: PurePosixPath) -> bool:
    if path.parts[:1] != (HOME_FOLDER,):
        return False
    inside = PurePosixPath(*path.parts[1:])
    return (len(inside.parts) > 1 and inside.parts[0] in _FOLDERS) or any(inside.match(name) for name in _FILES)


def list_files(home: Path) -> Iterator[Path]:
    """The files of a home that a backup has, and links among them. What vanishes meanwhile is passed over."""
    for pattern in _FILES:
        yield from home.glob(pattern)
    for name in _FOLDERS:
        yield from _walk(home / name)


def _walk(folder: Path) -> Iterator[Path]:
    try:
        children = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for child in children:
        if child.name.startswith(_BEING_WRITTEN):
            continue
        if child.is_dir() and not child.is_symlink():
            yield from _walk(child)
        else:
            yield child
