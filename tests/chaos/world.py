"""The whole service as real processes, with a relay before each of its servers, two workers, and a disk that can fill up."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.proxy import FaultProxy
from tests.disks import MIB, SmallDisk
from tests.end_to_end.site.stack import Stack
from tests.postgresql import postgresql_folder
from tests.worker.machines import give_measured_machines
from tests.worker.processes import is_alive, parent_of, wait_for
from worker.stack.supervisor import set_valkey_aside

WORKERS = ("worker-1", "worker-2")
SERVICES = ("reconciler", *WORKERS, "web")
DISK_BYTES = 8 << 30
FLOOR_BYTES = 64 * MIB
LEASE_S = 2
NO_LIMIT = "1000000"
_HALTS = 3
_MEET_S = 3.0
"""A worker with jobs writes several times in it."""
_WRITE_LOCK_BYTE = 120
"""From SQLite's wal.c: its locks begin at byte 120 of the shared memory, and the writer's is the first."""
_LAST_WORDS = 3000
"""Characters of the log of a service that ended."""


class World(Stack):
    """Made by ``running_world``. Databases: SQLite on the small disk, or PostgreSQL behind its own relay."""

    worker_app = "tests.chaos.quick.worker"
    control = "tests.chaos.control"

    def __init__(self, *, postgresql_url: str | None) -> None:
        self.postgresql_url = postgresql_url
        self.ended_alone: list[str] = []
        """Services that ended though no fault had ended them, with their exit codes and their last words."""
        self._draining: list[subprocess.Popen[bytes]] = []
        self.database_proxy: FaultProxy | None = None
        environment = {
            "HEADROOM_DISK_FLOOR_BYTES": str(FLOOR_BYTES),
            "HEADROOM_MAX_REQUESTS_PER_MINUTE": NO_LIMIT,
            "HEADROOM_LEASE_S": str(LEASE_S),
            # many passes in each round: they are what is tried here
            "HEADROOM_RECONCILE_S": "0.25",
            "HEADROOM_SLOTS": "6",
            "HEADROOM_GRACE_S": "10",
        }
        super().__init__(**environment)
        # not on the disk that fills up: Celery cannot begin where its first words find no room, and a service manager takes them
        self.log_folder = Path(tempfile.mkdtemp(prefix="headroom-logs-"))
        self.disk = _mount(self.home)
        for name in ("run", "valkey", "cache"):
            (self.home / name).mkdir(exist_ok=True)
        give_measured_machines(self.home)
        # what the control asks goes past the relays
        self._direct = dict(self._environment, **({"DATABASE_URL": postgresql_url} if postgresql_url else {}))
        self.redis_proxy = FaultProxy(self.home / "run" / "relay.sock", self.home / "run" / "valkey.sock")
        self._environment["REDIS_URL"] = f"unix://{self.home / 'run' / 'relay.sock'}"
        if postgresql_url:
            folder = postgresql_folder(postgresql_url)
            self.database_proxy = FaultProxy(self.home / "run" / ".s.PGSQL.5432", folder / ".s.PGSQL.5432")
            relay = str(self.home / "run").replace("/", "%2F")
            self._environment["DATABASE_URL"] = f"postgres://headroom@{relay}/postgres"

    def prepare(self) -> None:
        through_relays, self._environment = self._environment, self._direct
        try:
            super().prepare()
        finally:
            self._environment = through_relays

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def revive(self) -> None:
        """Start again whatever is not running, and wait until the web answers."""
        num_ended = len(self.ended_alone)
        if not self.is_running("valkey"):
            (self.home / "run" / "valkey.sock").unlink(missing_ok=True)
            # as the stack's supervisor does, which waits for a third death
            if len(self.ended_alone) > num_ended:
                set_valkey_aside(self.home / "valkey")
            self.start_valkey()
        for name in WORKERS:
            if not self.is_running(name):
                self.start_worker(name)
        if not self.is_running("reconciler"):
            self.start_reconciler()
        if not self.is_running("web"):
            self.start_web()

    def is_running(self, name: str) -> bool:
        process = self._processes.get(name)
        if process is not None and process.poll() is not None:
            self.ended_alone.append(f"{name} with {process.returncode}: {self.log(name)[-_LAST_WORDS:]}")
            del self._processes[name]
        return name in self._processes

    def kill_all(self, names: tuple[str, ...]) -> None:
        """All at once, as when the power goes."""
        running = [name for name in names if self.is_running(name)]
        for name in running:
            os.kill(self.pid(name), signal.SIGKILL)
        for name in running:
            self.kill(name)

    def ask_to_end(self, name: str) -> None:
        """TERM, as a deploy does it; another takes its place while it saves."""
        process = self._processes.pop(name)
        process.terminate()
        self._draining.append(process)

    def try_to_halt(self, name: str) -> bool:
        """SIGSTOP at a moment when it holds no lock; False where there is none, since others hold it or the disk is full."""
        for _ in range(_HALTS):
            os.kill(self.pid(name), signal.SIGSTOP)
            if self.ask("can_write"):
                return True
            self.wake(name)
            time.sleep(0.05)
        return False

    def try_to_halt_within_write(self, name: str) -> bool:
        """SIGSTOP at a moment when it holds SQLite's write lock; False where none was met in a while."""
        pid, until_s = self.pid(name), time.monotonic() + _MEET_S
        while time.monotonic() < until_s:
            if not self._writes(pid):
                continue
            os.kill(pid, signal.SIGSTOP)
            if self._writes(pid):
                return True
            self.wake(name)
        return False

    def _writes(self, pid: int) -> bool:
        """Report whether the process holds the byte of SQLite's shared memory that means a writer (WAL_WRITE_LOCK)."""
        try:
            inode = (self.home / "headroom.sqlite3-shm").stat().st_ino
        except OSError:
            return False
        held = re.compile(rf"\d+: POSIX +\w+ +WRITE {pid} \w+:\w+:{inode} (\d+) (\w+)")
        for found in map(held.match, Path("/proc/locks").read_text().splitlines()):
            if found and int(found[1]) <= _WRITE_LOCK_BYTE and (found[2] == "EOF" or int(found[2]) >= _WRITE_LOCK_BYTE):
                return True
        return False

    def children(self) -> dict[int, Path]:
        """Living processes of attempts and their folders."""
        found = {}
        for pid, command in self._of_this_home():
            if match := re.search(rf"{re.escape(str(self.home))}/jobs/\S+/attempts/\d+", command):
                found[pid] = Path(match[0])
        return found

    def strangers(self) -> list[str]:
        """Processes that work on this home, and that nobody started here or should have left."""
        self._draining = [process for process in self._draining if process.poll() is None]
        own = {process.pid for process in self._processes.values()}
        # on PostgreSQL the web server starts others beside it
        web = self._processes["web"].pid if "web" in self._processes else None
        return [
            f"{pid}: {command[:200]}"
            for pid, command in self._of_this_home()
            if pid not in own and is_alive(pid) and (web is None or parent_of(pid) != web)
        ]

    def _of_this_home(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
                if f"HOME={self.home}".encode() in environment or str(self.home) in command:
                    yield int(entry.name), command

    def close(self) -> None:
        for name in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[name].pid, signal.SIGCONT)
        for process in self._draining:
            process.kill()
            process.wait()
        super().close()
        self.redis_proxy.close()
        if self.database_proxy:
            self.database_proxy.close()
        shutil.rmtree(self.log_folder, ignore_errors=True)
        if self.disk:
            self.disk.close()
            with contextlib.suppress(OSError):
                self.home.rmdir()


def _mount(home: Path) -> SmallDisk | None:
    """None where no file system may be mounted: the faults of disks are left out there."""
    shutil.rmtree(home)
    try:
        return SmallDisk(home, num_bytes=DISK_BYTES)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no disk to fill: {error}", file=sys.stderr)
        home.mkdir(mode=0o700, exist_ok=True)
        return None


@contextlib.contextmanager
def running_world(*, postgresql_url: str | None) -> Iterator[World]:
    """All of it at work; ended and removed afterwards."""
    world = World(postgresql_url=postgresql_url)
    try:
        world.prepare()
        world.revive()
        wait_for(lambda: world.ask("num_machines") == 1, what=f"the machine's measurement\n{world.logs()}", timeout_s=600)
        yield world
    finally:
        world.close()
