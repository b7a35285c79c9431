"""Several web processes behind one port: the first serves, starts the others once it does, and ends with them.

Python works on one request at a time, so that a process takes what one core can. Each process listens on a socket of its own, and
the system shares out new connections among them (SO_REUSEPORT). One that dies is started again; when the first ends, however it
ends, the others are ended. What the processes have in common lies in the database and in Redis, and the figures of ``/metrics``
in files that they share.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvicorn

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by the Prometheus library when it is imported."""
HELPER_VARIABLE = "HEADROOM_WEB_HELPER_OF"
"""Process id of the first process, in the environment of the others."""
MOST_BY_THEMSELVES = 4
AGAIN_S = 1.0
"""Between the death of a process and the start of the next."""
_LOOK_S = 0.2
_END_S = 8.0
"""Beyond the time that a process gives its open requests."""
_PR_SET_PDEATHSIG = 1
"""From Linux' prctl.h."""


def default_processes() -> int:
    """One for each core, at most four; with SQLite one, since all would write to one file, and wait for it asleep."""
    if not os.environ.get("DATABASE_URL", "").startswith(("postgres", "psql", "pgsql")):
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), MOST_BY_THEMSELVES))


def is_helper() -> bool:
    """Report whether this process was started by the first one."""
    return HELPER_VARIABLE in os.environ


def shares_metrics() -> bool:
    """Report whether several processes write the figures of ``/metrics`` together."""
    return METRICS_VARIABLE in os.environ


def share_metrics() -> None:
    """Make the folder of the shared figures; before anything imports the Prometheus library."""
    os.environ[METRICS_VARIABLE] = tempfile.mkdtemp(prefix="headroom-metrics-")


def end_with_first() -> None:
    """Have the system end this helper when the first process is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ[HELPER_VARIABLE]):  # it went before the call
        raise SystemExit(0)


def shared_socket(host: str, port: int) -> socket.socket:
    """A socket on which other processes of this service may listen too. Raises OSError for a port that another program has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not is_helper():
        with socket.socket(family) as probe:  # without SO_REUSEPORT: two services must not share a port unnoticed
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
    # named in full: asyncio sends answers at once (TCP_NODELAY) only where it knows the protocol, else each waits 40 ms
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    made.set_inheritable(False)
    return made


class FirstServer(uvicorn.Server):
    """The server of the first process, which looks after the others."""

    def __init__(self, config: uvicorn.Config, *, num_helpers: int, arguments: Sequence[str]) -> None:
        """arguments: of the command line that starts a helper."""
        super().__init__(config)
        self._command = [sys.executable, "-m", "webapp.server", *arguments]
        self._helpers: list[subprocess.Popen[bytes] | None] = [None] * num_helpers
        self._keeper = threading.Thread(target=self._keep, name="helpers", daemon=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._keeper.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._keeper.join(_END_S)  # it has seen ``should_exit`` while this process closed its connections
        shutil.rmtree(os.environ[METRICS_VARIABLE], ignore_errors=True)

    def _keep(self) -> None:
        """Starts all helpers, and each that died anew, until the server ends. The system ends them with this thread."""
        while not self.should_exit:
            for place, helper in enumerate(self._helpers):
                if helper is None:
                    self._helpers[place] = self._start()
                elif helper.poll() is not None:
                    _forget_viewers(helper.pid)
                    time.sleep(AGAIN_S)
                    self._helpers[place] = None
            time.sleep(_LOOK_S)
        running = [helper for helper in self._helpers if helper is not None]
        for helper in running:
            helper.terminate()
        until_s = time.monotonic() + _END_S - 1
        for helper in running:
            try:
                helper.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, HELPER_VARIABLE: str(os.getpid())}
        return subprocess.Popen(self._command, env=environment, stdin=subprocess.DEVNULL)


def _forget_viewers(pid: int) -> None:
    """Drops a dead process's viewers. The library's ``mark_process_dead`` cannot be imported before the folder is made."""
    Path(os.environ[METRICS_VARIABLE], f"gauge_livesum_{pid}.db").unlink(missing_ok=True)
