"""Mirrors on a job's page and on the form: a link to the copy, or why it is not up to date."""

from collections.abc import Callable

from django.test import Client
from pytest_django import Settings

from tests.webapp.attempts.attempts import run
from webapp.attempts.records import record_mirror
from webapp.jobs.models import Job


def page_of(browser: Client, job: Job, *, url: str = "", trouble: str = "") -> str:
    Job.objects.filter(pk=job.pk).update(spec={**job.spec, "mirrors": ["mlflow"]})
    record_mirror(run(job.machine), name="mlflow", url=url, trouble=trouble)
    return browser.get(f"/jobs/{job.pk}/").content.decode()


def test_a_copy_is_linked(browser: Client, make_job: Callable[..., Job]) -> None:
    page = page_of(browser, make_job(), url="https://mlflow.example.org/#/runs/1")
    assert 'Copied to MLflow. <a href="https://mlflow.example.org/#/runs/1" rel="noreferrer">' in page


def test_a_copy_that_is_not_up_to_date_says_why(browser: Client, make_job: Callable[..., Job]) -> None:
    page = page_of(browser, make_job(), trouble="the server is away")
    assert "MLflow is not up to date:</strong> the server is away. The run goes on without it." in page


def test_the_form_offers_what_is_open_and_nothing_else(browser: Client, settings: Settings) -> None:
    settings.HEADROOM_MIRRORS = []
    assert "Copy the measurements to" not in browser.get("/jobs/new/").content.decode()
    settings.HEADROOM_MIRRORS = ["wandb"]
    page = browser.get("/jobs/new/").content.decode()
    assert ("Weights &amp; Biases" in page, "MLflow" in page) == (True, False)
