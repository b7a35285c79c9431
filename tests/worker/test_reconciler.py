"""The reconciler cleans up lost jobs, and acts only when it may."""

import os
import time
from pathlib import Path

import pytest
from django.db.models.functions import Now
from pytest_django import Settings

from tests.webapp.conftest import make_person
from tests.webapp.webhooks.receiver import Receiver
from tests.worker.claims import claim_new_job
from webapp.attempts.outcome import finish_attempt
from webapp.jobs.models import Attempt, Job
from webapp.webhooks.actions import create_webhook, send_test
from worker.config import WorkerConfig
from worker.reconciler import (
    SPOOL_AGE_S,
    Reconciler,
    remove_dead_artifacts,
    remove_dead_staging,
    remove_old_spool,
    remove_unused_checkpoints,
)


@pytest.fixture
def folder(tmp_path: Path, settings: Settings) -> Path:
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    settings.HEADROOM_HOME = tmp_path
    return tmp_path


@pytest.fixture
def attempt(db: None, folder: Path) -> Attempt:
    """A claimed job."""
    return claim_new_job()


def stage(folder: Path, job_id: str, fence: int) -> Path:
    path = folder / "jobs" / job_id / "checkpoints" / f".tmp-step-000010-f{fence}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"half")
    return path


def config(folder: Path, *, lease_s: int = 1) -> WorkerConfig:
    return WorkerConfig(home=folder, host="box", process_id=1, lease_s=lease_s)


def test_a_staged_checkpoint_of_the_present_claim_is_left_alone(attempt: Attempt, folder: Path) -> None:
    path = stage(folder, attempt.job_id, attempt.fence)
    assert remove_dead_staging(folder) == 0
    assert path.exists()


def test_a_staged_checkpoint_of_an_earlier_claim_is_removed(attempt: Attempt, folder: Path) -> None:
    path = stage(folder, attempt.job_id, attempt.fence - 1)
    assert remove_dead_staging(folder) == 1
    assert not path.exists()


def test_a_staged_checkpoint_of_an_ended_or_forgotten_job_is_removed(attempt: Attempt, folder: Path) -> None:
    finish_attempt(attempt, result={"outcome": "failed", "reason": "internal"}, exit_code=1)
    paths = [stage(folder, attempt.job_id, attempt.fence), stage(folder, "job_gone", 1)]
    assert remove_dead_staging(folder) == 2
    assert not any(path.exists() for path in paths)


def test_finished_checkpoints_are_never_touched(attempt: Attempt, folder: Path) -> None:
    path = folder / "jobs" / attempt.job_id / "checkpoints" / "step-000010-f1"
    path.mkdir(parents=True)
    remove_dead_staging(folder)
    assert path.exists()


def leave(folder: Path, job_id: str, fence: int) -> Path:
    path = folder / "jobs" / job_id / "artifacts" / f"f{fence}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "config.json").write_bytes(b"{}")
    return path


def succeed(attempt: Attempt) -> None:
    file = f"artifacts/f{attempt.fence}/model/config.json"
    named = {"kind": "model", "name": "config.json", "file": file, "num_bytes": 2, "sha256": "0" * 64}
    finish_attempt(attempt, result={"outcome": "succeeded", "artifacts": [named]}, exit_code=0)


def test_artifacts_of_the_present_claim_and_those_that_rows_name_are_left_alone(attempt: Attempt, folder: Path) -> None:
    path, settled = leave(folder, attempt.job_id, attempt.fence), set[Path]()
    assert remove_dead_artifacts(folder, settled=settled) == 0
    assert settled == set()  # its job may lose it yet
    succeed(attempt)
    assert remove_dead_artifacts(folder, settled=settled) == 0
    assert path.exists()
    assert settled == {path}


def test_artifacts_that_a_lost_attempt_leaves_are_removed_also_after_a_later_one_has_ended(
    attempt: Attempt, folder: Path
) -> None:
    later, settled = leave(folder, attempt.job_id, attempt.fence), set[Path]()
    for ends in (False, True):
        if ends:
            succeed(attempt)
        earlier = leave(folder, attempt.job_id, attempt.fence - 1)
        assert remove_dead_artifacts(folder, settled=settled) == 1
        assert not earlier.exists()
        assert later.exists()


def test_an_export_that_was_cut_short_is_removed_while_its_job_waits(attempt: Attempt, folder: Path) -> None:
    path = leave(folder, attempt.job_id, attempt.fence)
    finish_attempt(attempt, result=None, exit_code=-9)
    assert remove_dead_artifacts(folder, settled=set()) == 1
    assert not path.exists()


def test_artifacts_of_a_job_that_a_restored_backup_does_not_know_and_of_older_versions_stay(db: None, folder: Path) -> None:
    paths = [leave(folder, "job_restored", 3), folder / "jobs" / "job_old" / "artifacts" / "model"]
    paths[1].mkdir(parents=True)
    assert remove_dead_artifacts(folder, settled=set()) == 0
    assert all(path.exists() for path in paths)


def test_uploads_that_broke_off_a_day_ago_are_removed_and_younger_ones_kept(folder: Path) -> None:
    spool = folder / "spool"
    (spool / "old").mkdir(parents=True)
    (spool / "new.upload").write_bytes(b"half")
    long_ago_s = time.time() - SPOOL_AGE_S - 60
    os.utime(spool / "old", (long_ago_s, long_ago_s))
    assert remove_old_spool(folder) == 1
    assert [path.name for path in spool.iterdir()] == ["new.upload"]


@pytest.mark.parametrize("place", ["source", "branch/checkpoints"])
def test_what_was_put_aside_a_day_ago_for_a_job_that_was_not_made_is_removed(
    attempt: Attempt, folder: Path, place: str
) -> None:
    names = ("job_forgotten", "job_restored", "job_new", attempt.job_id)
    for name in names:
        (folder / "jobs" / name / place / "step-000010-f1").mkdir(parents=True)
    (folder / "jobs" / "job_restored" / "attempts").mkdir()
    long_ago_s = time.time() - SPOOL_AGE_S - 60
    for name in ("job_forgotten", "job_restored", attempt.job_id):
        os.utime(folder / "jobs" / name, (long_ago_s, long_ago_s))
    assert remove_unused_checkpoints(folder) == 1
    assert [name for name in names if (folder / "jobs" / name).exists()] == ["job_restored", "job_new", attempt.job_id]


def test_no_lease_is_taken_before_one_lease_has_passed_in_the_lead(attempt: Attempt, folder: Path) -> None:
    Job.objects.update(lease_until=Now())
    reconciler = Reconciler(config(folder, lease_s=3600))
    reconciler.reconcile_once()
    assert Job.objects.get().state == "starting"


def test_a_job_whose_lease_ran_out_goes_back_to_the_queue(attempt: Attempt, folder: Path) -> None:
    Job.objects.update(lease_until=Now())
    Reconciler(config(folder, lease_s=0)).reconcile_once()
    job = Job.objects.get()
    assert (job.state, job.reason) == ("queued", "worker_lost")


def test_it_ends_when_asked_to(db: None, folder: Path) -> None:
    pauses = []

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 2

    Reconciler(config(folder)).run(pause=pause)
    assert pauses == [5.0, 5.0]


@pytest.mark.django_db(transaction=True)
def test_it_sends_what_is_due_to_webhooks_without_a_broker(folder: Path, settings: Settings) -> None:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    receiver = Receiver()
    ada = make_person("ada")
    webhook, _ = create_webhook(ada, ada.home_project, url=receiver.url, events=[])
    delivery = send_test(webhook)

    def pause(seconds: float) -> bool:
        time.sleep(0.02)
        delivery.refresh_from_db()
        return delivery.state == "delivered"

    try:
        Reconciler(WorkerConfig(home=folder, host="box", process_id=1, reconcile_s=0.05)).run(pause=pause)
    finally:
        receiver.close()
    assert [headers["webhook-id"] for headers, _ in receiver.heard] == [delivery.pk]
