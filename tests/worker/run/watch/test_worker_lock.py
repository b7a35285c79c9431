"""Real processes: a worker is gone once nothing is left of it, and neither halted nor survived by what it started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.processes import wait_for
from worker.run.watch import worker_lock
from worker.run.watch.worker_lock import WorkerLock, gone_workers

WORKER = """
import json, subprocess, sys, time
from pathlib import Path
from worker.run.watch.worker_lock import WorkerLock
from worker.run.child import DeviceLock
own = WorkerLock(Path(sys.argv[1]), worker=sys.argv[2])
own.begin()
lock = DeviceLock(Path(sys.argv[1]) / "slot", beside=own.fds)
lock.acquire()
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
attempt = subprocess.Popen(sleep, pass_fds=lock.fds)
other = subprocess.Popen(sleep)
print(json.dumps([attempt.pid, other.pid]), flush=True)
time.sleep(300)
"""


class Worker:
    """A process with a lock of its own, one of an attempt, and one that has no part in it."""

    def __init__(self, home: Path, name: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", WORKER, str(home), name], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.attempt, self.other = json.loads(self.process.stdout.readline())

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def end_attempt(self) -> None:
        os.kill(self.attempt, signal.SIGKILL)

    def close(self) -> None:
        self.die()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in (self.attempt, self.other):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path, "box:7:a")
    yield worker
    worker.close()


def gone(home: Path, host: str = "box") -> list[str]:
    return list(gone_workers(home, host=host))


def test_one_that_works_or_was_halted_is_not_gone(worker: Worker, tmp_path: Path) -> None:
    assert gone(tmp_path) == []
    worker.process.send_signal(signal.SIGSTOP)
    assert gone(tmp_path) == []


def test_a_dead_one_is_gone_with_the_last_process_of_its_attempts_and_is_found_once(worker: Worker, tmp_path: Path) -> None:
    worker.die()
    assert gone(tmp_path) == []
    worker.end_attempt()
    assert wait_for(lambda: gone(tmp_path), what="its end to be seen") == ["box:7:a"]
    assert gone(tmp_path) == []


def test_one_is_found_again_as_long_as_what_it_held_could_not_be_given_back(worker: Worker, tmp_path: Path) -> None:
    worker.end_attempt()
    worker.die()
    wait_for(lambda: next(gone_workers(tmp_path, host="box"), None), what="its end to be seen")
    found = gone_workers(tmp_path, host="box")
    assert next(found) == "box:7:a"
    assert gone(tmp_path) == []  # by another, meanwhile
    found.close()
    assert gone(tmp_path) == ["box:7:a"]


def test_another_host_and_another_start_of_the_machine_are_none_of_its_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = WorkerLock(tmp_path, worker="box:7:b")
    own.begin()
    own.begin()
    assert gone(tmp_path) == []
    os.close(own.fds[0])
    assert gone(tmp_path, host="bo") == []
    with monkeypatch.context() as patch:
        patch.setattr(worker_lock, "boot_id", lambda: "another")
        assert gone(tmp_path) == []
    assert gone(tmp_path) == ["box:7:b"]
