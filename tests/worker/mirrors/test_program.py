"""The mirror's process as a worker starts it, with the real libraries: W&B offline, MLflow's store of files."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.mirrors.beside import run_mirror, write_attempt
from tests.worker.mirrors.noting import PROGRAM
from tests.worker.processes import wait_for
from worker.mirroring import mirror_environment

ROOT = Path(__file__).resolve().parents[3]
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="pip install 'headroom[wandb]'")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="pip install 'headroom[mlflow]'")
OPEN_TWICE = """
import os, sys
from pathlib import Path
from worker.mirrors import to_wandb
from worker.mirrors.mirror import Run
to_wandb.OPEN_WITHIN_S = 1
for mode in ("online", "offline"):
    os.environ["WANDB_MODE"] = mode
    try:
        to_wandb.ToWandb(Run(id="job_1", name="tiny", url="", config={}, folder=Path(sys.argv[1]))).finish("succeeded")
        print("opened")
    except Exception as error:
        print(type(error).__name__)
"""
NOBODY = "http://127.0.0.1:9"
"""The port of "discard", where nobody listens."""


def begin_noting(folder: Path) -> "subprocess.Popen[bytes]":
    """The process of a mirror of the attempt, which waits for the word on its end."""
    command = [sys.executable, "-I", "-c", PROGRAM, str(ROOT), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def notes_of(job_folder: Path, process: "subprocess.Popen[bytes]") -> list[str]:
    """The calls of a mirror's process, in their order."""
    file = job_folder / "mirrors" / "notes"
    lines = [line.split(" ", 1) for line in file.read_text().splitlines()] if file.exists() else []
    return [words.strip() for pid, words in lines if int(pid) == process.pid]


def test_a_mirror_that_was_left_over_ends_as_a_later_attempt_begins_and_says_nothing_more(tmp_path: Path) -> None:
    stale = begin_noting(write_attempt(tmp_path, 1, steps=range(1, 3)))
    try:
        wait_for(lambda: notes_of(tmp_path, stale) == ["open", "log 1 2"], what="the measurements of the first attempt")
        os.kill(stale.pid, signal.SIGSTOP)
        later = begin_noting(write_attempt(tmp_path, 2, steps=range(3, 5)))
        later.communicate(b"succeeded\n", timeout=60)
        assert notes_of(tmp_path, later) == ["open", "log 3 4", "finish succeeded"]
        os.kill(stale.pid, signal.SIGCONT)
        stale.communicate(b"\n", timeout=60)
    finally:
        stale.kill()
        stale.communicate()
    assert notes_of(tmp_path, stale) == ["open", "log 1 2"]


@needs_wandb
def test_wandb_gets_every_value_with_its_step_and_moment_and_nothing_of_the_machine(tmp_path: Path) -> None:
    folder = write_attempt(tmp_path)
    assert run_mirror("wandb", folder, environment={"WANDB_MODE": "offline"}) == [{"url": "", "trouble": ""}]
    [kept] = (tmp_path / "mirrors" / "wandb").glob("offline-run-*/run-job_1.wandb")
    written = kept.read_bytes()
    assert all(str(1000 + step).encode() in written for step in range(1, 5))
    assert b"loss/training" in written
    assert b"workload.adapter.rank" in written
    assert b"http://127.0.0.1:8400/jobs/job_1/" in written
    assert sys.executable.encode() not in written
    assert not list(kept.parent.rglob("requirements.txt"))


@needs_wandb
def test_wandb_can_be_opened_after_it_was_away(tmp_path: Path) -> None:
    """With the library as it is, a first try that failed keeps the run's id in use for every later one."""
    environment = {**os.environ, "WANDB_BASE_URL": NOBODY, "WANDB_API_KEY": "0" * 40}
    done = subprocess.run(
        [sys.executable, "-c", OPEN_TWICE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=mirror_environment(environment, name="wandb", home=tmp_path),
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == ["CommError", "opened"]


@needs_wandb
def test_an_attempt_that_goes_on_sends_what_is_new_alone(tmp_path: Path) -> None:
    offline = {"WANDB_MODE": "offline"}
    run_mirror("wandb", write_attempt(tmp_path, 1, steps=range(1, 5)), environment=offline, ending="")
    run_mirror("wandb", write_attempt(tmp_path, 2, steps=range(3, 5)), environment=offline)
    written = [file.read_bytes() for file in (tmp_path / "mirrors" / "wandb").glob("offline-run-*/run-job_1.wandb")]
    first, second = sorted(written, key=len, reverse=True)  # of four steps and of two
    assert (b"1002" in first, b"1002" in second, b"1003" in second) == (True, False, True)


@needs_mlflow
def test_mlflow_gets_every_value_with_its_step_and_moment(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": str(store), "MLFLOW_ALLOW_FILE_STORE": "true"}
    assert run_mirror("mlflow", write_attempt(tmp_path), environment=environment) == [{"url": "", "trouble": ""}]
    [losses] = store.glob("*/*/metrics/loss/training")
    assert [line.split()[:3] for line in losses.read_text().splitlines()] == [
        [str(1_000_000 + 1000 * step), str(5.0 - step), str(step)] for step in range(1, 5)
    ]
    run = losses.parents[2]
    assert (run / "params" / "workload.adapter.rank").read_text() == "8"
    assert (run / "tags" / "headroom.job").read_text() == "job_1"
    assert "status: 3" in (run / "meta.yaml").read_text()
    assert not list(tmp_path.rglob("telemetry.json"))  # which it keeps where it reports its use to its makers


@needs_mlflow
def test_mlflow_gets_what_describes_a_run_also_where_an_error_came_between(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": str(store), "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_mirror("mlflow", write_attempt(tmp_path, 1, steps=range(1, 3)), environment=environment, ending="")
    [described] = store.glob("*/*/params")
    for file in described.iterdir():
        file.unlink()
    run_mirror("mlflow", write_attempt(tmp_path, 2, steps=range(3, 5)), environment=environment)
    assert (described / "workload.adapter.rank").read_text() == "8"


@needs_mlflow
def test_mlflow_finds_the_run_of_an_earlier_attempt_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": str(store), "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_mirror("mlflow", write_attempt(tmp_path, 1, steps=range(1, 3)), environment=environment, ending="")
    run_mirror("mlflow", write_attempt(tmp_path, 2, steps=range(3, 5)), environment=environment, ending="failed")
    [losses] = store.glob("*/*/metrics/loss/training")
    assert [line.split()[2] for line in losses.read_text().splitlines()] == ["1", "2", "3", "4"]
    assert "status: 4" in (losses.parents[2] / "meta.yaml").read_text()


@needs_mlflow
def test_a_mirror_that_was_left_over_says_nothing_of_a_run_that_a_later_attempt_has_ended(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = {"MLFLOW_TRACKING_URI": str(store), "MLFLOW_ALLOW_FILE_STORE": "true"}
    stale = write_attempt(tmp_path, 1, steps=range(1, 3))
    run_mirror("mlflow", write_attempt(tmp_path, 2, steps=range(3, 5)), environment=environment)
    [run] = store.glob("*/*/meta.yaml")
    ended = run.read_text()
    assert run_mirror("mlflow", stale, environment=environment, ending="") == []
    assert run.read_text() == ended
    assert "status: 3" in ended


@needs_mlflow
def test_a_server_that_is_away_is_said_without_its_password_and_ends_in_time(tmp_path: Path) -> None:
    environment = {"MLFLOW_TRACKING_URI": "http://ada:open-sesame@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    [said] = run_mirror("mlflow", write_attempt(tmp_path), environment=environment)
    assert said["trouble"].startswith("MlflowException: API request to http://127.0.0.1:9/")
    assert "open-sesame" not in said["trouble"]


@needs_mlflow
def test_a_worker_without_a_server_says_which_variable_names_it(tmp_path: Path) -> None:
    [said] = run_mirror("mlflow", write_attempt(tmp_path), environment={"MLFLOW_TRACKING_URI": ""})
    assert "MLFLOW_TRACKING_URI is not set on this worker" in said["trouble"]
