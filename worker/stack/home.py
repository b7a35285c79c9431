"""Checks the embedded stack's folder, port and disk, and refuses each with one clear line."""

import errno
import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.base.errors import HeadroomError
from optimizer.base.units import GIB, format_bytes

PROGRAM_FOLDER = Path(__file__).resolve().parent.parent.parent
HOST = "127.0.0.1"
DEFAULT_PORT = 8400
LEAST_FREE_BYTES = GIB
MODEL_ROOTS = "HEADROOM_MODEL_ROOTS"
DATASET_ROOTS = "HEADROOM_DATASET_ROOTS"
LONGEST_SOCKET_PATH = 107
"""sockaddr_un holds 108 bytes on Linux, the last of them zero."""


class StackError(HeadroomError):
    """The stack cannot start or stop; one line says why."""

    code = "stack_error"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The stack's folder and the port it listens on."""

    home: Path
    port: int

    @classmethod
    def from_environment(cls) -> "Stack":
        home = os.environ.get("HEADROOM_HOME") or str(PROGRAM_FOLDER / ".headroom")
        port = os.environ.get("HEADROOM_PORT") or str(DEFAULT_PORT)
        if not port.isdigit() or not 1 <= int(port) <= 65535:
            raise StackError(f"HEADROOM_PORT is {port!r}; allowed: a number from 1 to 65535")
        return cls(home=Path(home).expanduser().resolve(), port=int(port))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def run_folder(self) -> Path:
        return self.home / "run"

    @property
    def log_folder(self) -> Path:
        return self.home / "log"

    @property
    def lock_file(self) -> Path:
        return self.run_folder / "stack.lock"

    @property
    def state_file(self) -> Path:
        return self.run_folder / "stack.json"

    @property
    def credentials_file(self) -> Path:
        return self.home / "cli.json"

    @property
    def valkey_socket(self) -> Path:
        return self.run_folder / "valkey.sock"

    def environment(self) -> dict[str, str]:
        """For the stack's processes: this one's, with the folder and port made plain."""
        return os.environ | {
            "HEADROOM_HOME": str(self.home),
            "HEADROOM_PORT": str(self.port),
            "HEADROOM_PUBLIC_URL": os.environ.get("HEADROOM_PUBLIC_URL", f"http://127.0.0.1:{self.port}"),
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            "PYTHONUNBUFFERED": "1",
            MODEL_ROOTS: os.environ.get(MODEL_ROOTS, default_roots()),
            DATASET_ROOTS: os.environ.get(DATASET_ROOTS, default_roots()),
        }

    def read_state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads(self.state_file.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return state


def default_roots() -> str:
    """Folders that the stack's user may name: their own home with the cache of Hugging Face's hub in it, and this program's.

    The stack listens on this machine alone and runs as this user; hidden folders stay closed unless they are listed.
    """
    hub = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    folders = [Path("~"), hub, PROGRAM_FOLDER]
    found = [folder.expanduser() for folder in folders]
    usable = [str(folder) for folder in found if folder.is_absolute() and folder != Path("/") and ":" not in str(folder)]
    return ":".join(dict.fromkeys(usable))


def prepare_home(stack: Stack) -> None:
    """The folders, for this user alone; enough room on the disk; a path that a socket's name has room for."""
    if "REDIS_URL" not in os.environ and len(os.fsencode(stack.valkey_socket)) > LONGEST_SOCKET_PATH:
        raise StackError(
            f"the path of HEADROOM_HOME is too long for a socket in it: {stack.valkey_socket} has "
            f"{len(os.fsencode(stack.valkey_socket))} bytes, at most {LONGEST_SOCKET_PATH} are allowed"
        )
    try:
        stack.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.home.chmod(0o700)
        for folder in (stack.run_folder, stack.log_folder, stack.home / "valkey"):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StackError(f"HEADROOM_HOME {stack.home} cannot be used: {error.strerror}") from error
    free_bytes = shutil.disk_usage(stack.home).free
    if free_bytes < LEAST_FREE_BYTES:
        raise StackError(
            f"only {format_bytes(free_bytes)} of disk are free under {stack.home}; "
            f"at least {format_bytes(LEAST_FREE_BYTES)} are needed",
            hint="Free some room, or set HEADROOM_HOME to a folder on another disk.",
        )


def check_port(stack: Stack) -> None:
    """Asked before anything starts, because a web server that cannot bind would only be restarted for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does: waiting connections do not count
        try:
            probe.bind((HOST, stack.port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            what = "in use" if error.errno == errno.EADDRINUSE else "not allowed for this user"
            raise StackError(
                f"port {stack.port} on {HOST} is {what}", hint="Set HEADROOM_PORT to a free one, for example 8401."
            ) from error


def write_private(file: Path, text: str) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    partial = file.with_name(f".{file.name}.part")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    partial.replace(file)
