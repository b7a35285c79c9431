"""Names, tags, notes and deletion of jobs, through the API and by themselves."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from webapp.accounts.tokens import create_token
from webapp.jobs.about import KEPT, MAX_TAGS, delete_job, describe_job_as, purge_deleted_jobs, read_tags, restore_job
from webapp.jobs.actions import cancel_job
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Job
from webapp.jobs.queries import deleted_jobs_visible_to, jobs_visible_to

pytestmark = pytest.mark.django_db


@pytest.fixture
def ended(make_job: Callable[..., Job]) -> Job:
    job = make_job()
    cancel_job(job, mode="discard", actor="user:ada")
    return job


@pytest.fixture
def ask(ada: User, client: Client) -> Callable[..., Any]:
    token = create_token(user=ada, name="t", scope="write")[1]

    def send(method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return client.generic(method, f"/api/v1/jobs/{path}", json.dumps(body or {}), "application/json", headers=headers)

    return send


def test_a_job_is_renamed_tagged_and_annotated_and_what_is_left_out_stays(ended: Job, ask: Callable[..., Any]) -> None:
    answer = ask("PATCH", ended.pk, {"name": "  night   run ", "tags": ["lora", "8B", "lora"]})
    assert (answer.status_code, answer.json()["name"], answer.json()["tags"]) == (200, "night run", ["lora", "8B"])
    assert ask("PATCH", ended.pk, {"notes": "best so far"}).json()["tags"] == ["lora", "8B"]
    assert ask("PATCH", ended.pk, {"tags": []}).json()["tags"] == []


@pytest.mark.parametrize(
    "body", [{"name": " "}, {"name": "x" * 201}, {"tags": ["<b>"]}, {"tags": ["x" * 41]}, {"notes": "x" * 20_001}]
)
def test_what_is_no_name_tag_or_note_is_refused_in_words(ended: Job, ask: Callable[..., Any], body: dict[str, Any]) -> None:
    answer = ask("PATCH", ended.pk, body)
    assert answer.status_code == 422
    assert next(iter(body)) in answer.json()["detail"] or "tag" in answer.json()["detail"]


def test_there_is_an_end_to_tags() -> None:
    with pytest.raises(InvalidInput, match=f"at most {MAX_TAGS}"):
        read_tags([f"tag {number}" for number in range(MAX_TAGS + 1)])


def test_a_job_at_work_is_not_deleted(make_job: Callable[..., Job], ask: Callable[..., Any]) -> None:
    job = make_job()
    with pytest.raises(WrongState, match="cannot delete job"):
        delete_job(job)
    assert ask("DELETE", job.pk).status_code == 409


def test_a_deleted_job_is_nowhere_until_it_is_restored(ada: User, ended: Job, ask: Callable[..., Any]) -> None:
    assert ask("DELETE", ended.pk).status_code == 200
    assert ask("GET", ended.pk).status_code == 404
    assert not jobs_visible_to(ada).exists()
    assert deleted_jobs_visible_to(ada).get() == ended
    assert ask("POST", f"{ended.pk}/restore").status_code == 200
    assert ask("POST", f"{ended.pk}/restore").status_code == 404
    assert jobs_visible_to(ada).get() == ended


def test_files_go_some_days_after_the_job_and_not_before(ended: Job, headroom_home: Path) -> None:
    folder = headroom_home / "jobs" / ended.pk
    folder.mkdir(parents=True)
    delete_job(ended)
    assert purge_deleted_jobs() == []
    Job.objects.filter(pk=ended.pk).update(deleted_at=timezone.now() - KEPT - timedelta(minutes=1))
    assert purge_deleted_jobs() == [ended.pk]
    assert not folder.exists()
    assert not Job.objects.filter(pk=ended.pk).exists()


def test_a_restored_job_is_not_purged(ended: Job) -> None:
    restore_job(delete_job(describe_job_as(ended, name="kept")))
    assert purge_deleted_jobs() == []
