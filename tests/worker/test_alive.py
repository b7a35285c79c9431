"""The health check of a worker's container."""

import os
import time
from pathlib import Path

import pytest

from worker.alive import STALE_AFTER_S, alive_file, main, mark_alive


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    monkeypatch.setenv("HEADROOM_WORKER_NAME", "card 0/a")


def test_a_worker_that_was_never_at_work_is_not_alive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 1
    assert "card 0/a has never been at work" in capsys.readouterr().err


def test_a_worker_that_has_just_reached_its_database_is_alive(tmp_path: Path) -> None:
    mark_alive(tmp_path, worker="card 0/a")
    assert main() == 0


def test_a_worker_that_has_been_silent_is_not_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_alive(tmp_path, worker="card 0/a")
    before = time.time() - STALE_AFTER_S - 10
    os.utime(alive_file(tmp_path, worker="card 0/a"), (before, before))
    assert main() == 1
    assert "last reached its database" in capsys.readouterr().err
