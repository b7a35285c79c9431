"""The supervisor's side of mirrors: what a mirror is given, and what its words do to the job."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from tests.webapp.conftest import make_text, make_tiny_model
from tests.worker.mirrors.beside import write_attempt
from webapp.attempts.records import record_mirror
from webapp.jobs.actions import cancel_job, create_job
from webapp.jobs.models import Job
from worker import mirroring
from worker.mirroring import Mirrors, follow, mirror_environment
from worker.run.child import child_environment

ENVIRONMENT = {
    "PATH": "/bin",
    "WANDB_API_KEY": "k",
    "MLFLOW_TRACKING_TOKEN": "t",
    "HEADROOM_SECRET_KEY": "s",
    "DATABASE_URL": "d",
}


@pytest.fixture
def job(db: None, tmp_path: Path, settings: Settings) -> Job:
    """A queued job that is to be copied to W&B."""
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    settings.HEADROOM_MIRRORS = ["wandb"]
    spec = {"name": "a", "workload": {"num_steps": 10}, "mirrors": ["wandb"]}
    rows = {"model": make_tiny_model(), "dataset": make_text(), "plan": None, "prediction": None, "machine": None}
    return create_job(owner=None, spec=spec, actor="user:ada", **rows)


def speaking(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_a_mirror_is_given_the_keys_of_its_own_service_alone(tmp_path: Path) -> None:
    given = mirror_environment(ENVIRONMENT, name="wandb", home=tmp_path)
    assert given == {"PATH": "/bin", "WANDB_API_KEY": "k", "HOME": str(tmp_path)}


def test_the_attempts_own_process_is_given_none_of_them(tmp_path: Path) -> None:
    assert not {"WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"} & set(child_environment(ENVIRONMENT, folder=tmp_path))


def test_a_mirrors_words_are_kept_with_the_job_and_a_trouble_is_an_event(job: Job) -> None:
    for trouble in ("away", "away", ""):
        record_mirror(job.pk, name="wandb", url="https://host/run", trouble=trouble)
    job.refresh_from_db()
    assert job.summary["mirrors"] == {"wandb": {"url": "https://host/run", "trouble": ""}}
    assert list(job.events.values_list("kind", "actor", "message"))[1:] == [("mirror_failed", "wandb", "away")]


def test_a_warning_after_the_end_leaves_the_end_as_it_is(job: Job) -> None:
    cancel_job(job, mode="save", actor="user:ada")
    record_mirror(job.pk, name="mlflow", url="", trouble="away")
    job.refresh_from_db()
    assert (job.state, job.summary["mirrors"]["mlflow"]["trouble"]) == ("cancelled", "away")


def test_an_address_that_a_browser_would_run_is_not_kept(job: Job) -> None:
    record_mirror(job.pk, name="mlflow", url="javascript:alert(1)", trouble="")
    job.refresh_from_db()
    assert job.summary["mirrors"]["mlflow"]["url"] == ""


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("print('{\"url\": \"\", \"trouble\": \"away\"}')", "away"),
        ("raise SystemExit(3)", "its process ended with exit code 3"),
        ("print('no JSON')", None),
    ],
)
def test_a_mirror_that_fails_in_whatever_way_raises_nothing(job: Job, code: str, trouble: Any) -> None:
    process = speaking(code)
    follow(process, job.pk, "wandb")
    process.wait()
    process.stdout.close()
    job.refresh_from_db()
    assert job.summary.get("mirrors", {}).get("wandb", {}).get("trouble") == trouble


def test_a_mirror_that_the_worker_has_not_opened_is_a_warning(job: Job, tmp_path: Path, settings: Settings) -> None:
    settings.HEADROOM_MIRRORS = []
    Mirrors(job, attempt_folder=tmp_path / "attempts" / "1").start()
    job.refresh_from_db()
    assert job.summary["mirrors"]["wandb"]["trouble"] == "this worker has not opened it (HEADROOM_MIRRORS)"


def test_a_mirror_that_cannot_be_started_is_a_warning(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "isolated_command", lambda *words: ["/no/such/program"])
    mirrors = Mirrors(job, attempt_folder=write_attempt(tmp_path))
    mirrors.start()
    mirrors.end("succeeded")
    job.refresh_from_db()
    assert job.summary["mirrors"]["wandb"]["trouble"] == "its process could not be started: No such file or directory"


def test_the_end_is_said_to_a_mirror_that_is_gone_without_a_fault(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mirroring, "isolated_command", lambda *words: [sys.executable, "-c", ""])
    monkeypatch.setattr(mirroring, "_follow_in_thread", lambda process, *words: started.append(process))
    mirrors = Mirrors(job, attempt_folder=write_attempt(tmp_path))
    mirrors.start()
    while not started:
        pass
    started[0].wait()
    mirrors.end("succeeded")
    started[0].stdout.close()
