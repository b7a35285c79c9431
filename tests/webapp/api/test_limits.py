"""Limits by person and by project answer 429, name themselves and say when to try again; they hold with and without Redis."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db.models import Q
from django.test import Client
from pytest_django import Settings

from tests.valkey import Valkey
from tests.webapp.conftest import make_spec
from webapp.accounts.errors import LimitReached
from webapp.catalog.files.stored import stored_bytes
from webapp.catalog.models import Dataset, Model
from webapp.jobs.actions import cancel_job
from webapp.jobs.checkpoints import export_job
from webapp.jobs.models import Artifact, Checkpoint, Job, State
from webapp.planning.submitting import submit_job
from webapp.serving.holding import hold
from webapp.serving.names import Target


@pytest.mark.parametrize("has_redis", [True, False])
def test_requests_past_a_person_s_limit_are_429_and_others_go_on(
    as_ada: Client, as_eve: Client, settings: Settings, has_redis: bool, request: pytest.FixtureRequest
) -> None:
    if has_redis:
        request.getfixturevalue("valkey")
    settings.HEADROOM_MAX_REQUESTS_PER_MINUTE = 3
    # seven, because a minute may end among them
    answers = [as_ada.get("/api/v1/me") for _ in range(7)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "limit_reached"
    assert refused.json()["detail"] == "you have sent 3 requests to the API in this minute; allowed: at most that"
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert as_eve.get("/api/v1/me").status_code == 200


def test_web_processes_count_together(valkey: Valkey, db: None) -> None:
    from webapp.wire.counting import _Counter

    first, second = _Counter(valkey.url), _Counter(valkey.url)
    counts = [counter.count("requests:1") for counter in (first, second, first, second, first)]
    assert max(counts) >= 3  # of five, wherever the minute ends
    valkey.kill()
    assert first.count("requests:1") >= 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("HEADROOM_MAX_QUEUED_PER_PERSON", "you have 2 jobs that wait; allowed: at most 2"),
        ("HEADROOM_MAX_QUEUED_PER_PROJECT", "project ada has 2 jobs that wait; allowed: at most 2"),
    ],
)
def test_a_job_past_the_queue_s_room_is_refused_by_the_limit_s_name(
    ada: User, model: Model, dataset: Dataset, make_job: Callable[..., Job], settings: Settings, setting: str, words: str
) -> None:
    setattr(settings, setting, 2)
    make_job()
    make_job()
    with pytest.raises(LimitReached) as refused:
        submit_job(ada, spec=make_spec(model, dataset), actor="test")
    assert refused.value.message == words
    assert refused.value.fields["limit"] == setting


@pytest.mark.parametrize("setting", ["HEADROOM_MAX_QUEUED_PER_PERSON", "HEADROOM_MAX_QUEUED_PER_PROJECT"])
def test_retries_and_exports_past_the_queue_s_room_are_429(
    as_ada: Client, make_job: Callable[..., Job], settings: Settings, headroom_home: Path, setting: str
) -> None:
    job = make_job()
    (headroom_home / "jobs" / job.pk / "checkpoints/step-1-f1").mkdir(parents=True)
    Checkpoint.objects.create(
        job=job, step=1, fence=1, folder="checkpoints/step-1-f1", manifest_sha256="", num_bytes=0
    )
    cancel_job(job, mode="discard", actor="user:ada")
    setattr(settings, setting, 1)
    assert as_ada.post(f"/api/v1/jobs/{job.pk}/retry").status_code == 202
    for move in ("retry", "export"):
        refused = as_ada.post(f"/api/v1/jobs/{job.pk}/{move}", "{}", content_type="application/json")
        assert (refused.status_code, refused.json()["extra"]["limit"]) == (429, setting)
    assert Job.objects.filter(state=State.QUEUED).count() == 1
    export_job(job, actor="program")
    assert Job.objects.filter(state=State.QUEUED).count() == 2


def test_a_model_is_not_held_by_a_job_past_the_queue_s_room(
    ada: User, model: Model, make_job: Callable[..., Job], settings: Settings
) -> None:
    make_job()
    settings.HEADROOM_MAX_QUEUED_PER_PERSON = 1
    with pytest.raises(LimitReached):
        hold(ada, Target(model=model))
    settings.HEADROOM_MAX_QUEUED_PER_PERSON = 2
    held = hold(ada, Target(model=model))
    assert hold(ada, Target(model=model)) == held


def test_requests_past_a_project_s_limit_are_429_for_all_its_people_and_other_projects_go_on(
    as_ada: Client, as_eve: Client, make_job: Callable[..., Job], settings: Settings, valkey: Valkey
) -> None:
    job = make_job()
    settings.HEADROOM_MAX_REQUESTS_PER_MINUTE_PER_PROJECT = 3
    answers = [as_ada.get(f"/api/v1/jobs/{job.pk}") for _ in range(7)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["extra"]["limit"] == "HEADROOM_MAX_REQUESTS_PER_MINUTE_PER_PROJECT"
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert as_eve.get("/api/v1/jobs").status_code == 200
    # what is not theirs is not there, and costs the project nothing
    assert as_eve.get(f"/api/v1/jobs/{job.pk}").status_code == 404


def send_text(client: Client, num_bytes: int) -> Any:
    file = SimpleUploadedFile("a.txt", b"word " * (num_bytes // 5))
    return client.post("/api/v1/datasets", {"name": "a text", "file": file})


@pytest.mark.parametrize(
    ("setting", "has"),
    [("HEADROOM_MAX_STORED_BYTES_PER_PERSON", "ada has"), ("HEADROOM_MAX_STORED_BYTES_PER_PROJECT", "project ada has")],
)
def test_an_upload_past_what_may_be_stored_is_refused_with_what_is_used_and_allowed(
    as_ada: Client, as_eve: Client, settings: Settings, setting: str, has: str
) -> None:
    setattr(settings, setting, 10_000)
    assert send_text(as_ada, 6_000).status_code == 201
    for answer in (send_text(as_ada, 6_000), begin_upload_of(as_ada, 6_000)):
        assert answer.status_code == 409
        document = answer.json()
        assert document["code"] == "storage_limit_reached"
        assert document["detail"].startswith(f"{has} 5.86 KiB stored, and this has 5.86 KiB; allowed: 9.77 KiB together")
        assert document["extra"] == {
            "limit": setting, "used_bytes": 6_000, "announced_bytes": 0, "num_bytes": 6_000, "allowed_bytes": 10_000,
        }  # fmt: skip
        assert setting in document["hint"]
    assert send_text(as_eve, 6_000).status_code == 201
    assert begin_upload_of(as_ada, 3_000).status_code == 201
    # what is on its way has its room
    assert begin_upload_of(as_ada, 3_000).json()["extra"]["announced_bytes"] == 3_000


def begin_upload_of(client: Client, num_bytes: int) -> Any:
    files = [{"name": "a.txt", "num_bytes": num_bytes, "sha256": "0" * 64}]
    body = {"kind": "dataset", "name": "a text", "files": files}
    return client.post("/api/v1/uploads", json.dumps(body), content_type="application/json")


def test_models_and_runs_count_by_their_files_and_links_do_not(
    ada: User, model: Model, make_job: Callable[..., Job], headroom_home: Path
) -> None:
    Model.objects.filter(pk=model.pk).update(owner=ada)
    folder = headroom_home / model.folder
    own_bytes = (folder / "tokenizer.json").stat().st_size
    (folder / "weights").write_bytes(b"x" * 500)
    (folder / "elsewhere").symlink_to(folder / "tokenizer.json")
    shared = headroom_home / "of-a-run"
    shared.write_bytes(b"x" * 700)
    (folder / "linked").hardlink_to(shared)
    job = make_job()
    Artifact.objects.create(job=job, kind="model", name="weights", file="a", num_bytes=30, sha256="")
    Checkpoint.objects.create(job=job, step=1, fence=1, folder="c", manifest_sha256="", num_bytes=4)
    assert stored_bytes(Q(owner=ada)) == own_bytes + 534
