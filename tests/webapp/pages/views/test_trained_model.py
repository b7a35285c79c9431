"""The way from a finished run to its model, over its page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.webapp.exported import ADAPTER, leave
from tests.webapp.pages import rows
from webapp.accounts.projects import set_member
from webapp.catalog.models import Model
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db
BUTTON = 'id="action-model"'


@pytest.fixture
def job(ada: User, headroom_home: Path) -> Job:
    return leave(rows.make_job(ada), headroom_home)


def page_of(browser: Client, name: str, row: Job, **options: Any) -> str:
    answer = browser.get(reverse(name, args=[row.pk]), **options)
    assert answer.status_code == 200
    return answer.content.decode()


def test_a_finished_run_offers_to_make_it_a_model(browser: Client, job: Job) -> None:
    text = page_of(browser, "job", job)
    assert BUTTON in text
    assert f'action="/jobs/{job.pk}/model/"' in text


def test_the_button_comes_with_the_head_that_a_live_page_asks_for(browser: Client, job: Job) -> None:
    assert BUTTON in page_of(browser, "job_head", job)


def test_it_leads_to_the_model_with_what_can_be_done_with_it(browser: Client, job: Job) -> None:
    answer = browser.post(reverse("job_model", args=[job.pk]), follow=True)
    model = Model.objects.get(from_job_id=job.pk)
    assert answer.redirect_chain == [(f"/models/{model.pk}/", 302)]
    text = answer.content.decode()
    assert f"{job.name} is a model now." in text
    assert f'/jobs/new/generate/?model={model.pk}"' in text
    assert f'/jobs/new/?model={model.pk}&amp;mode=finetune"' in text
    assert f'trained <small>by <a href="/jobs/{job.pk}/">{job.name}</a>' in text


def test_the_forms_that_follow_have_it_filled_in(browser: Client, job: Job) -> None:
    browser.post(reverse("job_model", args=[job.pk]))
    model = Model.objects.get(from_job_id=job.pk)
    form = browser.get("/jobs/new/", {"model": model.pk, "mode": "finetune"}).context["form"]
    assert (form["model"].value(), form["mode"].value()) == (model.pk, "finetune")
    assert browser.get("/jobs/new/generate/", {"model": model.pk}).context["form"]["model"].value() == model.pk


def test_afterwards_the_run_leads_there_in_the_button_s_place(browser: Client, job: Job) -> None:
    browser.post(reverse("job_model", args=[job.pk]))
    model = Model.objects.get(from_job_id=job.pk)
    text = page_of(browser, "job", job)
    assert f'It is the model <a href="/models/{model.pk}/">{job.name}</a> now.' in text
    assert BUTTON not in text


def test_pressed_twice_it_is_one_model(browser: Client, job: Job) -> None:
    locations = [browser.post(reverse("job_model", args=[job.pk]))["Location"] for _ in range(2)]
    assert locations[0] == locations[1]


def test_who_may_only_look_is_not_offered_it(client: Client, eve: User, job: Job) -> None:
    set_member(job.project, username="eve", role="viewer")
    client.force_login(eve)
    assert BUTTON not in page_of(client, "job", job)
    assert client.post(reverse("job_model", args=[job.pk])).status_code == 403


def test_a_run_that_left_adapters_alone_says_how_to_get_a_model(
    browser: Client, ada: User, headroom_home: Path
) -> None:
    job = leave(rows.make_job(ada), headroom_home, model=None, adapter=ADAPTER)
    text = page_of(browser, "job", job)
    assert BUTTON not in text
    assert f"/jobs/new/?from={job.pk}&amp;export_adapter=both" in text


def test_files_that_are_gone_are_reported_on_the_run_s_page(browser: Client, job: Job, headroom_home: Path) -> None:
    (headroom_home / "jobs" / job.pk / "artifacts" / "model" / "config.json").unlink()
    answer = browser.post(reverse("job_model", args=[job.pk]), follow=True)
    assert answer.redirect_chain[0][0] == f"/jobs/{job.pk}/"
    assert f"File config.json of job {job.pk} is gone. " in answer.content.decode()


@pytest.mark.parametrize("make", [rows.make_job, rows.make_generate_job])
def test_a_job_that_goes_on_offers_nothing(browser: Client, ada: User, make: Callable[..., Any]) -> None:
    assert BUTTON not in page_of(browser, "job", make(ada))
