"""A run under a link that anyone may read: made, read without an account, taken back."""

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.webapp.pages import rows
from webapp.jobs.about import share_job, shared_path
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(ada: User) -> Job:
    return rows.make_job(ada)


def test_a_link_is_made_read_by_strangers_and_taken_back(browser: Client, job: Job) -> None:
    assert "Make a link" in browser.get(reverse("job", args=[job.pk])).content.decode()
    browser.post(reverse("job_share", args=[job.pk]), {"share": "yes"})
    job.refresh_from_db()
    path = shared_path(job)
    assert f"http://testserver{path}" in browser.get(reverse("job", args=[job.pk])).content.decode()
    read = Client().get(path)
    assert read.status_code == 200
    assert job.name in read.content.decode()
    assert read["X-Robots-Tag"] == "noindex"
    assert Client().get(f"{path}metrics").json().keys() >= {"steps", "evals"}
    browser.post(reverse("job_share", args=[job.pk]), {"share": "no"})
    assert Client().get(path).status_code == 404
    share_job(job)
    assert Client().get(path).status_code == 404, "an old link must not come back to life"


def test_a_shared_page_offers_nothing_private(browser: Client, job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(notes="for our eyes only")
    page = Client().get(share_job(job)).content.decode()
    for private in ("for our eyes only", "/api/v1/", "<form", "tables/", "action-stop", job.model_id, str(job.dataset_id)):
        assert private not in page


def test_a_shared_page_says_nothing_of_the_queue(browser: Client, job: Job) -> None:
    second = rows.make_job(job.owner, name="second")
    assert "1 job ahead" in browser.get(reverse("job", args=[second.pk])).content.decode()
    assert "ahead" not in Client().get(share_job(second)).content.decode()


def test_no_link_is_guessed(job: Job) -> None:
    assert shared_path(job) == ""
    assert Client().get(f"/shared/{job.pk}/x/").status_code == 404
    path = share_job(job)
    other = path.replace(job.pk, "job_other")
    assert Client().get(other).status_code == 404
    assert Client().get(path[:-3] + "xx/").status_code == 404
    Job.objects.filter(pk=job.pk).update(deleted_at=job.created_at)
    assert Client().get(path).status_code == 404
