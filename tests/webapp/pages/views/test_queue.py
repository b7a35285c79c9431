"""The queue as a page."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.pages import rows
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


PART = {"HX-Request": "true"}


def test_an_empty_queue_says_so_and_its_address_leads_to_the_jobs(browser: Client) -> None:
    text = browser.get("/queue/", headers=PART).content.decode()
    assert "No jobs waiting" in text
    assert "No jobs running" in text
    assert browser.get("/queue/")["Location"] == "/jobs/"


def test_a_waiting_job_says_why_and_can_be_moved(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    text = browser.get("/jobs/").content.decode()
    assert "Waiting for a free worker." in text
    assert "sooner" not in text
    rows.make_job(ada)
    assert "Waiting for a free worker; 1 job ahead." in browser.get("/jobs/").content.decode()
    answer = browser.post(f"/jobs/{job.pk}/move/", {"to": "later"}, follow=True)
    assert Job.objects.get(pk=job.pk).priority == -1
    assert f"Move {job.name} sooner" in answer.content.decode()


def test_a_move_that_is_not_allowed_says_so_and_changes_nothing(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    answer = browser.post(f"/jobs/{job.pk}/move/", {"to": "sooner"}, follow=True)
    assert "Only administrators move jobs ahead of others" in answer.content.decode()
    assert Job.objects.get(pk=job.pk).priority == 0


def test_a_move_on_the_page_is_answered_with_the_rows_and_what_was_refused(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    for to, said in (("later", f'id="sooner-{job.pk}"'), ("sooner", "Move"), ("sooner", "Only administrators move jobs")):
        answer = browser.post(f"/jobs/{job.pk}/move/", {"to": to}, headers={"HX-Request": "true"})
        text = answer.content.decode()
        assert answer.status_code == 200
        assert text.strip().startswith('<div id="queue-rows"')
        assert said in text
    assert text.index('role="alert">') < text.index("Only administrators move jobs") < text.index("</p>")


def test_a_waiting_job_is_paused_and_resumed_where_it_stands(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    text = browser.post(f"/jobs/{job.pk}/move/", {"to": "pause"}, follow=True).content.decode()
    assert "Paused: it may not start until it is resumed." in text
    assert Job.objects.get(pk=job.pk).pause_requested_at is not None
    text = browser.post(f"/jobs/{job.pk}/move/", {"to": "resume"}, follow=True).content.decode()
    assert f"Pause {job.name}" in text
    assert Job.objects.get(pk=job.pk).pause_requested_at is None


def test_someone_else_s_job_is_not_there(browser: Client, eve: User) -> None:
    assert browser.post(f"/jobs/{rows.make_job(eve).pk}/move/", {"to": "later"}).status_code == 404


def test_a_refresh_sends_the_rows_alone(browser: Client, ada: User) -> None:
    rows.make_job(ada)
    assert "<html" not in browser.get("/queue/", headers={"HX-Request": "true"}).content.decode()
