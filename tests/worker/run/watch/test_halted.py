"""A process that something has halted is noticed, and no other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.processes import wait_for
from worker.run.child import Child, StopOrder
from worker.run.watch import halted
from worker.run.watch.halted import HaltWatch

SLEEPER = [sys.executable, "-c", "import time; time.sleep(300)"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halted, "HALTED_S", 0.2)
    monkeypatch.setattr(halted, "_LOOK_S", 0.05)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER)
    yield process
    process.kill()
    process.wait()


def test_a_halted_process_is_noticed_until_it_goes_on(sleeper: subprocess.Popen[bytes]) -> None:
    watch = HaltWatch(sleeper.pid)
    assert not watch.has_stood_still()
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(watch.has_stood_still, what="the halt to be noticed")
    os.kill(sleeper.pid, signal.SIGCONT)
    wait_for(lambda: not watch.has_stood_still(), what="its end to be noticed")


def test_a_process_that_is_gone_stands_not_still(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    watch = HaltWatch(sleeper.pid)
    assert not any(watch.has_stood_still() for _ in range(3))


def test_an_attempt_that_was_halted_is_ended(tmp_path: Path) -> None:
    child = Child(SLEEPER, folder=tmp_path)
    try:
        stop = StopOrder(grace_s=60)
        stop.act(child, "", is_fenced_out=False)
        assert not child.has_ended()
        os.kill(child.pid, signal.SIGSTOP)

        def has_ended() -> bool:
            stop.act(child, "", is_fenced_out=False)
            return child.has_ended()

        wait_for(has_ended, what="the end of the halted process")
        assert child.reap() == -signal.SIGKILL
        assert not stop.is_asked
    finally:
        child.close()
