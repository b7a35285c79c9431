"""The audit trail: what is in it, what is not, and that nothing in it changes."""

from collections.abc import Callable

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import DatabaseError, transaction
from django.test import AsyncClient, Client
from pytest_django import Settings

from webapp.accounts.audit import FAILED_LOGINS_PER_MINUTE, record
from webapp.accounts.models import AuditRecord, Scope
from webapp.accounts.projects import create_project, set_member
from webapp.accounts.tokens import create_token
from webapp.jobs.models import Job


@pytest.fixture
def browser(client: Client, ada: User) -> Client:
    client.force_login(ada)
    return client


def newest() -> AuditRecord:
    return AuditRecord.objects.order_by("-pk").first()


def test_what_somebody_does_is_recorded_with_who_what_where_and_from_where(
    browser: Client, ada: User, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    browser.post(f"/jobs/{job.pk}/cancel/", REMOTE_ADDR="192.0.2.7")
    row = newest()
    assert (row.actor, row.action, row.target, row.outcome) == ("ada", "job.cancel", job.pk, "done")
    assert (row.address, row.project_id, row.token_id) == ("192.0.2.7", ada.home_project.pk, "")


def test_a_request_by_token_names_the_token(ada: User, make_job: Callable[..., Job]) -> None:
    token, text = create_token(user=ada, name="laptop")
    job = make_job()
    Client(headers={"Authorization": f"Bearer {text}"}).post(f"/api/v1/jobs/{job.pk}/pause")
    assert (newest().action, newest().token_id, newest().target) == ("job.pause", token.pk, job.pk)


def test_a_refusal_is_recorded_with_its_reason(eve: User, ada: User, make_job: Callable[..., Job]) -> None:
    project = create_project(ada, name="summaries")
    set_member(project, username="eve", role="viewer")
    job = make_job(project=project)
    client = Client()
    client.force_login(eve)
    assert client.post(f"/jobs/{job.pk}/cancel/").status_code == 403
    row = newest()
    assert (row.actor, row.action, row.outcome, row.project_id) == ("eve", "job.cancel", "refused", project.pk)
    assert row.detail == "this needs the role member in project summaries; you are a viewer"


def test_reading_asking_and_what_went_wrong_leave_no_record(browser: Client, make_job: Callable[..., Job]) -> None:
    before = AuditRecord.objects.count()
    browser.get("/jobs/")
    browser.post("/api/v1/plans", "{}", content_type="application/json")
    browser.post("/projects/", {"name": ""})
    browser.post("/api/v1/jobs", "{}", content_type="application/json")
    assert AuditRecord.objects.count() == before


def test_a_new_token_is_recorded_without_its_secret(browser: Client) -> None:
    page = browser.post("/tokens/", {"name": "laptop", "days": 9, "scope": "read", "project": ""}).content.decode()
    secret = page.split('id="new-token" class="mono">')[1].split("<")[0].split("_", 2)[2]
    row = newest()
    assert (row.action, row.detail) == ("token.create", "laptop, read, all projects")
    assert secret[:20] not in str(AuditRecord.objects.values())


def test_log_ins_and_their_failures_are_recorded(ada: User, client: Client) -> None:
    client.post("/login/", {"username": "ada", "password": "wrong"})
    assert (newest().action, newest().actor, newest().outcome) == ("login", "ada", "refused")
    client.post("/login/", {"username": "ada", "password": "correct horse battery"})
    assert (newest().action, newest().actor, newest().outcome) == ("login", "ada", "done")
    client.post("/logout/")
    assert newest().action == "logout"


def test_strangers_cannot_fill_the_trail(db: None, settings: Settings, client: Client) -> None:
    from django.core.cache import cache

    cache.clear()
    for number in range(FAILED_LOGINS_PER_MINUTE + 5):
        client.post("/login/", {"username": f"name{number}", "password": "x"})
    assert AuditRecord.objects.count() == FAILED_LOGINS_PER_MINUTE
    cache.clear()


def test_a_record_is_never_changed(db: None) -> None:
    row = record(None, actor="ada", action="job.cancel")
    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
        AuditRecord.objects.update(actor="eve")
    with pytest.raises(DatabaseError), transaction.atomic():
        row.save()


def test_a_name_cannot_forge_a_line(db: None) -> None:
    assert record(None, actor="ada\njob.cancel by eve", action="login").actor == "ada�job.cancel by eve"


def test_administrators_read_all_of_it_and_a_projects_own_its_part(
    ada: User, admin: User, make_job: Callable[..., Job]
) -> None:
    project = create_project(ada, name="summaries")
    record(None, actor="ada", action="job.cancel", project_id=project.pk)
    record(None, actor="eve", action="job.pause", project_id="project_other")
    tokens = {person: create_token(user=person, name="t", scope=Scope.ADMIN)[1] for person in (ada, admin)}

    def read(person: User, path: str) -> int | list[str]:
        answer = Client(headers={"Authorization": f"Bearer {tokens[person]}"}).get(path)
        return [row["action"] for row in answer.json()["results"]] if answer.status_code == 200 else answer.status_code

    assert read(admin, "/api/v1/audit") == ["job.pause", "job.cancel"]
    assert read(admin, "/api/v1/audit?actor=eve") == ["job.pause"]
    assert read(ada, "/api/v1/audit") == 403
    assert read(ada, f"/api/v1/projects/{project.pk}/audit") == ["job.cancel"]


def test_the_page_shows_it_a_page_at_a_time(admin: User) -> None:
    for number in range(60):
        record(None, actor="ada", action="job.cancel", target=f"target-{number:02}")
    client = Client()
    client.force_login(admin)
    first = client.get("/audit/?who=ada").content.decode()
    assert "target-59" in first
    assert "target-05" not in first
    older = first.split('href="?')[-1].split('"')[0].replace("&amp;", "&")
    assert "target-05" in client.get(f"/audit/?{older}").content.decode()


async def test_an_asynchronous_server_admits_refuses_and_records_alike(transactional_db: None) -> None:
    ada, job_id = await sync_to_async(_ada_and_her_job)()
    client, stranger = AsyncClient(), AsyncClient()
    await client.aforce_login(ada)
    assert (await client.post(f"/jobs/{job_id}/pause/")).status_code == 302
    assert (await client.get("/people/")).status_code == 403
    assert (await stranger.get("/jobs/"))["Location"] == "/login/?next=/jobs/"
    rows = await sync_to_async(lambda: list(AuditRecord.objects.values_list("action", "target", "outcome")))()
    assert ("job.pause", job_id, "done") in rows


def _ada_and_her_job() -> tuple[User, str]:
    from tests.webapp.pages import rows

    ada = rows.make_user("ada")
    return ada, rows.make_job(ada).pk
