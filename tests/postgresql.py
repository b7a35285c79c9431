"""A real PostgreSQL server on a Unix socket in a temporary folder."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4


@contextmanager
def running_postgresql(*options: str) -> Iterator[str]:
    """The server's address while the context lasts. options: settings as ``name=value``.

    The server refuses to run as root, so root lends it another user.
    """
    folder = Path(tempfile.mkdtemp(prefix="hrpg-"))
    runs_as_root = os.geteuid() == 0
    user: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if runs_as_root else {}
    if runs_as_root:
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"

    def call(program: str, *arguments: str) -> None:
        command = [_find_program(program), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, **user)

    call(
        "initdb", "-D", str(data), "-U", "headroom", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"
    )
    settings = " ".join(f"-c {option}" for option in ("listen_addresses=''", *options))
    call("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-o", f"-k {folder} {settings}", "-w", "start")
    try:
        yield f"postgres://headroom@{str(folder).replace('/', '%2F')}/postgres"
    finally:
        call("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def create_database(url: str, *, template: str = "template1") -> str:
    """The address of a new database on the server that has this address: empty, or with all that another database has, to which
    nobody may be connected.
    """
    import psycopg  # here, since tests/conftest.py imports this module on machines with nothing of the service

    name = f"database_{uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return f"{url.rpartition('/')[0]}/{name}"


def postgresql_folder(url: str) -> Path:
    """Folder of the server with this address, where its socket and its data are."""
    return Path(unquote(url.partition("@")[2].partition("/")[0]))


def restart_postgresql(url: str, *, mode: str) -> None:
    """mode: ``fast`` ends all sessions, ``immediate`` is a crash that it recovers from."""
    folder = postgresql_folder(url)
    user: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    command = [_find_program("pg_ctl"), "-D", str(folder / "data"), "-l", str(folder / "log"), "-m", mode, "-w", "restart"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, **user)


def _find_program(name: str) -> str:
    """Find a program on PATH, or else the newest below /usr/lib/postgresql, where Debian hides the server's programs."""
    found = shutil.which(name)
    if found:
        return found
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    assert installed, f"PostgreSQL's {name} is not installed"
    return str(installed[-1])
