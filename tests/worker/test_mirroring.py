"""The supervisor's side of mirrors: what a mirror is given, and what its words do to the job."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from tests.worker.claims import claim_new_job
from tests.worker.mirrors.beside import write_attempt
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_mirror
from webapp.jobs.models import Attempt, Job
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
def attempt(db: None, tmp_path: Path, settings: Settings) -> Attempt:
    """A claimed job that is to be copied to W&B."""
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    settings.HEADROOM_MIRRORS, settings.HEADROOM_HOME = ["wandb"], tmp_path
    claimed = claim_new_job()
    claimed.job.spec["mirrors"] = ["wandb"]
    claimed.job.save(update_fields=["spec"])
    return claimed


def status_of(attempt: Attempt) -> dict[str, Any]:
    """The state of each mirror as the job's row has it."""
    return dict(Job.objects.get(pk=attempt.job_id).summary.get("mirrors", {}))


def speaking(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_a_mirror_is_given_the_keys_of_its_own_service_alone(tmp_path: Path) -> None:
    given = mirror_environment(ENVIRONMENT, name="wandb", home=tmp_path)
    assert given == {"PATH": "/bin", "WANDB_API_KEY": "k", "HOME": str(tmp_path)}


def test_the_attempts_own_process_is_given_none_of_them(tmp_path: Path) -> None:
    assert not {"WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"} & set(child_environment(ENVIRONMENT, folder=tmp_path))


def test_a_mirrors_words_are_kept_with_the_job_and_a_trouble_is_an_event(attempt: Attempt) -> None:
    for trouble in ("away", "away", ""):
        record_mirror(attempt, name="wandb", url="https://host/run", trouble=trouble)
    assert status_of(attempt) == {"wandb": {"url": "https://host/run", "trouble": ""}}
    events = list(attempt.job.events.values_list("kind", "actor", "message"))
    assert events[-1] == ("mirror_failed", "wandb", "away")
    assert [kind for kind, *_ in events].count("mirror_failed") == 1


def test_a_warning_after_the_end_leaves_the_end_as_it_is(attempt: Attempt) -> None:
    finish_attempt(attempt, result={"outcome": "failed", "reason": "internal"}, exit_code=1)
    record_mirror(attempt, name="mlflow", url="", trouble="away")
    assert Job.objects.get(pk=attempt.job_id).state == "failed"
    assert status_of(attempt)["mlflow"]["trouble"] == "away"


def test_what_a_mirror_that_was_left_over_says_is_not_the_word_on_a_later_attempt(attempt: Attempt) -> None:
    finish_attempt(attempt, result={"outcome": "drained"}, exit_code=75)
    later = claim_job(worker="w:2", machine=attempt.machine, lease_s=60)
    assert later is not None
    record_mirror(later, name="wandb", url="https://host/run", trouble="")
    record_mirror(attempt, name="wandb", url="", trouble="its process ended with exit code 1")
    assert status_of(attempt) == {"wandb": {"url": "https://host/run", "trouble": ""}}


def test_an_address_that_a_browser_would_run_is_not_kept(attempt: Attempt) -> None:
    record_mirror(attempt, name="mlflow", url="javascript:alert(1)", trouble="")
    assert status_of(attempt)["mlflow"]["url"] == ""


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("print('{\"url\": \"\", \"trouble\": \"away\"}')", "away"),
        ("raise SystemExit(3)", "its process ended with exit code 3"),
        ("print('no JSON')", None),
    ],
)
def test_a_mirror_that_fails_in_whatever_way_raises_nothing(attempt: Attempt, code: str, trouble: Any) -> None:
    process = speaking(code)
    follow(process, attempt, "wandb")
    process.wait()
    process.stdout.close()
    assert status_of(attempt).get("wandb", {}).get("trouble") == trouble


def test_a_mirror_that_the_worker_has_not_opened_is_a_warning(attempt: Attempt, tmp_path: Path, settings: Settings) -> None:
    settings.HEADROOM_MIRRORS = []
    Mirrors(attempt, attempt_folder=tmp_path / "attempts" / "1").start()
    assert status_of(attempt)["wandb"]["trouble"] == "this worker has not opened it (HEADROOM_MIRRORS)"


def test_a_mirror_that_cannot_be_started_is_a_warning(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "isolated_command", lambda *words: ["/no/such/program"])
    mirrors = Mirrors(attempt, attempt_folder=write_attempt(tmp_path))
    mirrors.start()
    mirrors.end("succeeded")
    assert status_of(attempt)["wandb"]["trouble"] == "its process could not be started: No such file or directory"


def test_the_end_is_said_to_a_mirror_that_is_gone_without_a_fault(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(mirroring, "isolated_command", lambda *words: [sys.executable, "-c", ""])
    monkeypatch.setattr(mirroring, "_follow_in_thread", lambda process, *words: started.append(process))
    mirrors = Mirrors(attempt, attempt_folder=write_attempt(tmp_path))
    mirrors.start()
    while not started:
        pass
    started[0].wait()
    mirrors.end("succeeded")
    started[0].stdout.close()
