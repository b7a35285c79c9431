"""The frame of every page: search, the theme, the first page and its picture of the demo's run."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.conftest import make_person, make_tiny_model
from tests.webapp.pages import rows
from webapp.jobs.models import Attempt, Job, State
from webapp.pages.shown.demo_run import REFUSED, TUNED, demo_run, recorded

pytestmark = pytest.mark.django_db
PART = {"HX-Request": "true"}


def test_search_finds_jobs_by_name_and_by_the_end_of_their_id_and_pages_by_their_subject(browser: Client, ada: User) -> None:
    job = rows.make_job(ada, name="summaries of March")
    model = make_tiny_model(ada, name="Marchbank")
    text = browser.get("/search/", {"q": "march"}, headers=PART).content.decode()
    assert f'data-href="/jobs/{job.pk}/"' in text
    assert f'data-href="/models/{model.pk}/"' in text
    assert f"/jobs/{job.pk}/" in browser.get("/search/", {"q": job.pk[-6:]}).content.decode()
    assert 'data-href="/machines/"' in browser.get("/search/", {"q": "gpu"}, headers=PART).content.decode()
    assert "Nothing is called “nowhere”" in browser.get("/search/", {"q": "nowhere"}, headers=PART).content.decode()


def test_search_finds_nothing_of_others(browser: Client) -> None:
    job = rows.make_job(make_person("mallory"), name="secret")
    assert job.pk not in browser.get("/search/", {"q": "secret"}, headers=PART).content.decode()


def test_the_theme_is_kept_and_forgotten(browser: Client) -> None:
    answer = browser.post("/settings/theme/", {"theme": "dark"}, headers={"Referer": "http://testserver/jobs/?q=a"})
    assert answer["Location"] == "http://testserver/jobs/?q=a"
    assert '<html lang="en" data-theme="dark">' in browser.get("/jobs/").content.decode()
    assert browser.post("/settings/theme/", {"theme": "system"}, headers=PART).status_code == 204
    assert '<html lang="en">' in browser.get("/jobs/").content.decode()


@pytest.mark.parametrize("referer", ["https://elsewhere.example/", ""])
def test_a_theme_leads_to_no_other_site(browser: Client, referer: str) -> None:
    assert browser.post("/settings/theme/", {"theme": "neon"}, headers={"Referer": referer})["Location"] == "/"
    assert '<html lang="en">' in browser.get("/jobs/").content.decode()


def test_the_first_page_shows_the_recorded_run_and_then_the_services_own(ada: User) -> None:
    assert demo_run(ada).document == recorded()
    assert demo_run(ada).plain.total_bytes > recorded()["budget_bytes"] >= demo_run(ada).headroom.total_bytes
    tuned, refused = (rows.make_job(ada, name=name) for name in (TUNED, REFUSED))
    Attempt.objects.create(job=tuned, number=1, fence=99, worker="w", measured={"device_bytes_by_category": {"weights": 5}})
    Job.objects.filter(pk=refused.pk).update(prediction={"device_bytes_by_category": {"weights": 700}})
    Job.objects.filter(pk=tuned.pk).update(state=State.SUCCEEDED, finished_at=tuned.created_at)
    found = demo_run(ada)
    assert (found.job_id, found.headroom.total_bytes, found.plain.total_bytes) == (tuned.pk, 5, 700)


def test_who_is_logged_in_sees_how_they_may_change_the_page(browser: Client) -> None:
    text = browser.get("/settings/").content.decode()
    assert "ada" in text
    assert "Change your password" in text
    assert 'aria-pressed="true">System' in text
