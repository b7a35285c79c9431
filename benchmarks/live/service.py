"""The web half of the embedded stack on a folder of its own, and a writer that stands for the worker.

The processes are those that ``headroom up`` starts; the stack's supervisor is left out, so that a process stays dead until the
benchmark says otherwise.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from optimizer.base.errors import HeadroomError
from worker.stack.home import HOST, PROGRAM_FOLDER, Stack, prepare_home
from worker.stack.stack import run_manage
from worker.stack.supervisor import services_of

START_LIMIT_S = 90.0


class LiveService:
    """Use as a context manager: everything it started ends with it."""

    def __init__(self) -> None:
        # short, because the path of a Unix socket may have 107 characters
        home = Path(tempfile.mkdtemp(prefix="hr-live-"))
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        self._stack = Stack(home=home, port=port)
        self._commands = {service.name: service.command for service in services_of(self._stack)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._writer: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return self._stack.url

    @property
    def port(self) -> int:
        return self._stack.port

    def __enter__(self) -> Self:
        prepare_home(self._stack)
        self.start("valkey")
        run_manage(self._stack, "migrate", "--verbosity", "0")
        run_manage(self._stack, "collectstatic", "--noinput", "--verbosity", "0")
        self._writer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.live.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROGRAM_FOLDER,
            env=self._stack.environment(),
        )
        self.start("web")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in tuple(self._processes):
            self.kill(name)
        if self._writer is not None:
            self._writer.kill()
            self._writer.communicate()
        if kind is not None:
            print(self.log("web"), file=sys.stderr)
        shutil.rmtree(self._stack.home, ignore_errors=True)

    def start(self, name: str) -> None:
        """``valkey`` or ``web``, until it answers."""
        with (self._stack.log_folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name], cwd=PROGRAM_FOLDER, env=self._stack.environment(), stdout=log, stderr=log
            )
        answers = {"valkey": self._stack.valkey_socket.exists, "web": self._web_answers}
        wait_for(answers[name], what=f"{name} to answer")

    def kill(self, name: str) -> None:
        """SIGKILL, and gone."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        if name == "valkey":
            self._stack.valkey_socket.unlink(missing_ok=True)

    def memory_bytes(self, field: str) -> int:
        """Memory of the web process: ``VmRSS`` now, or ``VmHWM`` at its highest."""
        status = Path(f"/proc/{self._processes['web'].pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024

    def processor_s(self, name: str) -> float:
        """Time on a processor since it started."""
        fields = Path(f"/proc/{self._processes[name].pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def ask(self, command: str, /, **arguments: object) -> Any:
        """One command of ``writer.py`` and its answer."""
        self.send(command, **arguments)
        return self.hear()

    def send(self, command: str, /, **arguments: object) -> None:
        """The same without waiting; ``hear`` gives the answer."""
        assert self._writer is not None
        assert self._writer.stdin is not None
        self._writer.stdin.write(json.dumps([command, arguments]) + "\n")
        self._writer.stdin.flush()

    def hear(self) -> Any:
        assert self._writer is not None
        assert self._writer.stdout is not None
        line = self._writer.stdout.readline()
        if not line:
            raise HeadroomError("the writer has ended; its error is above")
        return json.loads(line)

    def log(self, name: str) -> str:
        """The end of what it printed."""
        file = self._stack.log_folder / f"{name}.log"
        return file.read_text()[-4000:] if file.exists() else ""

    def _web_answers(self) -> bool:
        if self._processes["web"].poll() is not None:
            raise HeadroomError(f"the web process has ended: {self.log('web')}")
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


def wait_for(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise HeadroomError(f"waited {START_LIMIT_S:.0f} s in vain for {what}")
        time.sleep(0.02)
