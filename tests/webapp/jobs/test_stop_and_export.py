"""A stop leaves weights that can be used, a checkpoint alone, or nothing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse
from pytest_django import DjangoCaptureOnCommitCallbacks

from tests.webapp.attempts.attempts import DONE, DRAINED, failed, run
from tests.webapp.conftest import make_spec
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_checkpoint
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import CancelMode, cancel_job, retry_job
from webapp.jobs.checkpoints import BRANCH_FOLDER, SOURCE_FOLDER, export_job, exports_of
from webapp.jobs.errors import JobConflict
from webapp.jobs.models import Attempt, Job
from webapp.planning.submitting import submit_job
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db
CHECKPOINT = "step-000005-f1"


def leave_checkpoint(job: Job, machine: Machine) -> Attempt:
    folder = settings.HEADROOM_HOME / "jobs" / job.pk / "checkpoints" / CHECKPOINT
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"w")
    attempt = run(machine, job_id=job.pk)
    assert record_checkpoint(attempt, step=5, folder=f"checkpoints/{CHECKPOINT}", manifest_sha256="0", num_bytes=1)
    return attempt


def job_folders() -> set[str]:
    return {path.name for path in (settings.HEADROOM_HOME / "jobs").iterdir()}


@pytest.mark.parametrize(("mode", "num_exports"), [("save", 1), ("keep", 0), ("discard", 0)])
def test_a_stopped_run_exports_its_last_checkpoint_if_that_was_asked_for(
    make_job: Callable[..., Job], machine: Machine, mode: CancelMode, num_exports: int
) -> None:
    """Stop and save left a checkpoint that nothing could use."""
    job = make_job()
    attempt = leave_checkpoint(job, machine)
    cancel_job(job, mode=mode, actor="user:ada")
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    exports = exports_of(job)
    assert [(each.state, each.spec["step"]) for each in exports] == [("queued", 5)] * num_exports
    for each in exports:
        kept = settings.HEADROOM_HOME / "jobs" / each.pk / SOURCE_FOLDER / CHECKPOINT / "weights.safetensors"
        assert kept.read_bytes() == b"w"


def test_a_stop_that_is_asked_for_as_the_attempt_ends_exports_too(
    make_job: Callable[..., Job], machine: Machine, django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    job = make_job()
    attempt = leave_checkpoint(job, machine)
    is_asked = False

    def ask_before_the_first_transaction(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        nonlocal is_asked
        if sql.startswith("SAVEPOINT") and not is_asked:
            is_asked = True
            cancel_job(job, mode="save", actor="user:ada")
        return execute(sql, *arguments)

    with django_capture_on_commit_callbacks(execute=True), connection.execute_wrapper(ask_before_the_first_transaction):
        assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    (export,) = exports_of(job)
    assert job_folders() == {job.pk, export.pk}


def test_nothing_stays_aside_of_a_run_that_succeeds_after_all(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = leave_checkpoint(job, machine)
    cancel_job(job, mode="save", actor="user:ada")
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"
    assert exports_of(job) == []
    assert job_folders() == {job.pk}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The disk has no links; by file that is copied, whether that is within a transaction."""
    found: list[bool] = []

    def refuse(*_: object) -> None:
        found.append(connection.in_atomic_block)
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    return found


@pytest.mark.django_db(transaction=True)
def test_no_checkpoint_is_copied_within_a_transaction(
    ada: User, new_llama: Model, dataset: Dataset, machine: Machine, copies: list[bool]
) -> None:
    """A copy takes minutes, in which no other lease could be renewed on SQLite."""
    spec = make_spec(new_llama, dataset)
    job = submit_job(ada, spec=spec, when_ready=True, actor="user:ada")
    Job.objects.update(awaits_plan=False)
    attempt = leave_checkpoint(job, machine)
    client = Client()
    client.force_login(ada)
    assert client.post(f"/api/v1/jobs/{job.pk}/export", "{}", content_type="application/json").status_code == 201
    assert client.post(reverse("job_export", args=[job.pk])).status_code == 302
    branch = submit_job(ada, spec={**spec, "resume_from": {"job": job.pk}}, when_ready=True, actor="user:ada")
    cancel_job(job, mode="save", actor="user:ada")
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    assert copies == [False] * 4
    exports = exports_of(job)
    assert len(exports) == 3
    kept = {each.pk: f"{SOURCE_FOLDER}/{CHECKPOINT}" for each in exports}
    kept |= {branch.pk: f"{BRANCH_FOLDER}/checkpoints/{CHECKPOINT}"}
    assert job_folders() == {job.pk, *kept}
    for job_id, folder in kept.items():
        assert (settings.HEADROOM_HOME / "jobs" / job_id / folder / "weights.safetensors").read_bytes() == b"w"


def test_an_export_that_is_retried_reads_what_was_put_aside_for_the_first(
    make_job: Callable[..., Job], machine: Machine
) -> None:
    job = make_job()
    leave_checkpoint(job, machine)
    export = export_job(job, actor="user:ada")
    for _ in range(2):
        attempt = run(machine, job_id=export.pk)
        assert finish_attempt(attempt, result=failed("internal"), exit_code=1) == "failed"
        export = retry_job(export, actor="user:ada")
    attempt = run(machine, job_id=export.pk)
    home = settings.HEADROOM_HOME
    brief = make_brief(attempt, folder=home, home=home, devices=["cpu"])
    assert (Path(brief["checkpoint_folder"]) / "weights.safetensors").read_bytes() == b"w"


def test_nothing_stays_aside_for_a_job_that_is_not_made(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    leave_checkpoint(job, machine)

    def refuse(made: Job) -> None:
        assert job_folders() == {job.pk, made.pk}
        raise JobConflict("not this one")

    with pytest.raises(JobConflict):
        export_job(job, actor="user:ada", and_then=refuse)
    assert exports_of(job) == []
    assert job_folders() == {job.pk}
