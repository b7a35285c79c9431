"""Copies the database as it is at one moment, while others write, and puts the copy back."""

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg

from worker.stack.backup.contents import DATABASE_FILES, BackupError, DatabaseKind

SQLITE_FILE = "headroom.sqlite3"


def database_kind() -> DatabaseKind:
    """By DATABASE_URL."""
    return "postgresql" if os.environ.get("DATABASE_URL", "").startswith("postgres") else "sqlite"


def copy_database(home: Path, folder: Path) -> Path:
    """Write the copy into a backup's folder and return its file. Raises BackupError."""
    kind = database_kind()
    target = folder / DATABASE_FILES[kind]
    if kind == "sqlite":
        _copy_sqlite(home / SQLITE_FILE, target)
    else:
        _run_program("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={target}")
    return target


def restore_database(copy: Path, home: Path, kind: DatabaseKind) -> None:
    """Put a copy in the place of no database. Raises BackupError."""
    if kind == "sqlite":
        shutil.copyfile(copy, home / SQLITE_FILE)
        (home / SQLITE_FILE).chmod(0o600)
        _check_sqlite(home / SQLITE_FILE)
    else:
        _run_program("pg_restore", "--no-owner", "--no-privileges", "--exit-on-error", "--single-transaction", str(copy))


def require_empty_database(kind: DatabaseKind) -> None:
    """Raises BackupError where the database of a backup cannot go, or would go over another one."""
    if kind != database_kind():
        wanted = "Set DATABASE_URL to an empty database of it" if kind == "postgresql" else "Take DATABASE_URL away"
        raise BackupError(f"the backup holds a database of {kind}; DATABASE_URL names {database_kind()}", hint=f"{wanted}.")
    if kind == "postgresql":
        try:
            with psycopg.connect(os.environ["DATABASE_URL"], connect_timeout=10) as connection:
                row = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()").fetchone()
        except psycopg.Error as error:
            raise BackupError(f"the database of DATABASE_URL does not answer: {error}") from error
        if row is None or row[0]:
            raise BackupError(
                f"the database of DATABASE_URL has {row[0] if row else 'some'} tables; allowed: an empty one",
                hint="Make a new database, and name it in DATABASE_URL.",
            )


def _copy_sqlite(file: Path, target: Path) -> None:
    if not file.exists():
        raise BackupError(f"{file} is not there", hint="Nothing was ever started with this HEADROOM_HOME.")
    try:
        with (
            closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=60)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            # in one step: a snapshot, beside which others go on writing
            source.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise BackupError(f"the database cannot be copied: {error}") from error
    _check_sqlite(target)


def _check_sqlite(file: Path) -> None:
    try:
        with closing(sqlite3.connect(file)) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        found = str(error)
    if found != "ok":
        raise BackupError(f"{file} is damaged: {found}")


def _run_program(name: str, *arguments: str) -> None:
    """One of PostgreSQL's own programs; the password goes by its environment, which others cannot read."""
    program = shutil.which(name) or next(iter(sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")))[-1:]), None)
    if program is None:
        raise BackupError(f"{name} is not installed", hint="It comes with PostgreSQL's client programs, of the server's version.")
    parts = urlsplit(os.environ["DATABASE_URL"])
    around, _, host = parts.netloc.rpartition("@")
    user, _, password = around.partition(":")
    address = urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))
    secret = {"PGPASSWORD": unquote(password)} if password else {}
    done = subprocess.run(
        [program, *arguments, f"--dbname={address}"],
        env=os.environ | secret,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BackupError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
