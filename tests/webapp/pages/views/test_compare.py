"""Runs side by side, as a page."""

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from tests.webapp.pages import rows
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


def compare(browser: Client, *jobs: Any) -> Any:
    return browser.get("/jobs/compare/", {"job": [job.pk for job in jobs]})


def test_runs_are_called_by_letters_and_link_to_themselves(browser: Client, ada: User) -> None:
    a, b = rows.make_job(ada, name="first"), rows.make_job(ada, name="second")
    text = compare(browser, a, b).content.decode()
    for letter, job in (("A", a), ("B", b)):
        assert re.search(rf'<b>{letter}</b> <a href="/jobs/{job.pk}/">{job.name}</a>', text)


def test_the_best_value_is_marked_and_said(browser: Client, ada: User) -> None:
    a, b = rows.make_job(ada), rows.make_job(ada)
    Job.objects.filter(pk=a.pk).update(summary={"tokens_per_s": 900.0})
    Job.objects.filter(pk=b.pk).update(summary={"tokens_per_s": 1200.0})
    text = compare(browser, a, b).content.decode()
    assert '<b><span class="num">1,200</span></b><span class="hidden-text"> best</span>' in text
    assert '<b><span class="num">900</span></b>' not in text


def test_runs_that_do_not_differ_are_said_to_be_alike(browser: Client, ada: User) -> None:
    assert "asked for and planned alike" in compare(browser, rows.make_job(ada), rows.make_job(ada)).content.decode()


def test_without_a_choice_the_page_says_how_to_choose(browser: Client) -> None:
    answer = browser.get("/jobs/compare/")
    assert answer.status_code == 200
    assert "Choose 2 to 10 jobs" in answer.content.decode()


def test_one_job_alone_and_someone_elses_are_refused_with_the_reason(browser: Client, ada: User, eve: User) -> None:
    mine, hers = rows.make_job(ada), rows.make_job(eve)
    for answer, reason in ((compare(browser, mine), "1 jobs are named"), (compare(browser, mine, hers), "is not there")):
        assert answer.status_code == 422
        assert reason in answer.content.decode()


def test_the_list_offers_a_box_for_each_job(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    text = browser.get("/jobs/").content.decode()
    assert f'form="bulk-form" name="job" value="{job.pk}" aria-label="Choose {job.name}"' in text


def test_a_comparison_takes_as_many_queries_for_many_as_for_two(
    browser: Client, ada: User, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    jobs = [rows.make_job(ada) for _ in range(6)]
    with django_assert_max_num_queries(7):
        compare(browser, *jobs)
