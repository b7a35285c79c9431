"""The lists: jobs and tokens."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from pytest_django import DjangoAssertNumQueries

from tests.webapp.pages import rows
from webapp.accounts.models import ApiToken
from webapp.accounts.tokens import find_token_user
from webapp.catalog.bundled import ensure_bundled
from webapp.catalog.models import Dataset, Model
from webapp.pages.views.jobs import PAGE_SIZE

pytestmark = pytest.mark.django_db


def text_of(browser: Client, name: str, **query: Any) -> str:
    return browser.get(reverse(name), query).content.decode()


def test_an_empty_list_of_jobs_offers_the_one_next_step(browser: Client) -> None:
    text = text_of(browser, "jobs")
    assert "No jobs yet" in text
    assert "Describe the first job" in text


def test_an_empty_list_offers_the_bundled_example_whose_form_is_filled_from_the_demos_file(browser: Client) -> None:
    assert "bundled example" not in text_of(browser, "jobs")
    ensure_bundled()
    assert f'href="{reverse("job_new")}?example=yes"' in text_of(browser, "jobs")
    form = browser.get(reverse("job_new"), {"example": "yes"}).context["form"]
    shown = {name: form[name].value() for name in ("name", "num_steps", "learning_rate", "device_budget", "forbid")}
    assert shown == {
        "name": "kjv-demo", "num_steps": 150, "learning_rate": 1e-3, "device_budget": "400 MiB",
        "forbid": ["accumulate", "chunked_loss"],
    }
    chosen = (Model.objects.get(pk=form["model"].value()).preset, Dataset.objects.get(pk=form["dataset"].value()).name)
    assert chosen == ("headroom-demo-10m", "kjv")


def test_jobs_are_filtered_by_name_and_state(browser: Client, ada: User) -> None:
    for name in ("alpha", "beta"):
        rows.make_job(ada, name=name)
    assert [row["job"].name for row in browser.get("/jobs/?q=ALP").context["jobs"]] == ["alpha"]
    assert "No job matches" in text_of(browser, "jobs", state="failed")


def test_the_list_shows_only_ones_own_jobs(browser: Client, ada: User, eve: User) -> None:
    rows.make_job(ada, name="mine")
    rows.make_job(eve, name="hers")
    assert [row["job"].name for row in browser.get("/jobs/").context["jobs"]] == ["mine"]


def test_older_jobs_are_a_page_away_and_none_is_missed(browser: Client, ada: User) -> None:
    made = [rows.make_job(ada, name=f"job {number}").pk for number in range(PAGE_SIZE + 3)]
    first = browser.get("/jobs/")
    second = browser.get(first.context["older_url"])
    seen = [row["job"].pk for answer in (first, second) for row in answer.context["jobs"]]
    assert seen == sorted(made, reverse=True)
    assert second.context["older_url"] == ""


def test_a_refresh_sends_the_rows_alone_under_the_same_filter(browser: Client, ada: User) -> None:
    rows.make_job(ada)
    text = browser.get("/jobs/?q=kjv", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in text
    assert 'hx-get="/jobs/?q=kjv"' in text


def test_a_list_of_jobs_takes_as_many_queries_for_many_as_for_one(
    browser: Client, ada: User, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for _ in range(5):
        rows.make_job(ada)
    with django_assert_max_num_queries(22):
        browser.get("/jobs/")


def test_a_token_is_shown_once_and_works(browser: Client, ada: User) -> None:
    answer = browser.post(reverse("tokens"), {"name": "laptop", "days": "30"})
    token = answer.context["new_token"]
    assert token in answer.content.decode()
    assert answer["Cache-Control"] == "no-store"
    assert find_token_user(token) == ada
    assert token not in text_of(browser, "tokens")


def test_a_revoked_token_opens_nothing(browser: Client) -> None:
    token = browser.post(reverse("tokens"), {"name": "laptop", "days": "30"}).context["new_token"]
    browser.post(reverse("token_revoke", args=[ApiToken.objects.get().pk]))
    assert find_token_user(token) is None
    assert ">revoked<" in text_of(browser, "tokens")


def test_a_token_that_would_live_too_long_is_refused_beside_its_field(browser: Client) -> None:
    text = browser.post(reverse("tokens"), {"name": "laptop", "days": "400"}).content.decode()
    assert "days is 400; allowed: 1 to 365" in text
    assert 'value="laptop"' in text
    assert not ApiToken.objects.exists()
