"""The list of jobs by sort, group, columns, tags and saved views, and what is done to many at once."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.conftest import make_person
from tests.webapp.pages import rows
from webapp.jobs.actions import cancel_job
from webapp.jobs.models import Job, Sample, SavedFilter
from webapp.pages.shown.job_rows import spark_points

pytestmark = pytest.mark.django_db


def names(browser: Client, query: str) -> list[str]:
    return [row["job"].name for row in browser.get(f"/jobs/?{query}").context["jobs"]]


def ended(owner: User, **changes: Any) -> Job:
    job = rows.make_job(owner, **changes)
    cancel_job(job, mode="discard", actor="user:ada")
    return job


def test_jobs_are_sorted_by_a_column_either_way_with_unknown_values_last(browser: Client, ada: User) -> None:
    for name, loss in (("b", 2.5), ("a", 10.0), ("c", None)):
        job = rows.make_job(ada, name=name)
        Job.objects.filter(pk=job.pk).update(summary={"loss": loss} if loss else {})
    assert names(browser, "sort=loss") == ["b", "a", "c"]
    assert names(browser, "sort=-loss") == ["a", "b", "c"]
    assert names(browser, "sort=name") == ["a", "b", "c"]
    assert names(browser, "sort=nonsense&page=x&group=y") == ["c", "a", "b"]


def test_jobs_are_grouped_and_paged_without_missing_one(browser: Client, ada: User) -> None:
    for number in range(30):
        rows.make_job(ada, name=f"job {number:02}")
    first = browser.get("/jobs/?group=state&sort=name")
    second = browser.get(first.context["older_url"])
    seen = [row["job"].name for answer in (first, second) for row in answer.context["jobs"]]
    assert seen == [f"job {number:02}" for number in range(30)]
    assert first.content.decode().count('<tr class="group">') == 1


def test_columns_that_were_not_chosen_are_left_out(browser: Client, ada: User) -> None:
    rows.make_job(ada)
    text = browser.get("/jobs/?columns=peak").content.decode()
    assert 'data-label="Peak"' in text
    assert 'data-label="Loss"' not in text


def test_a_tag_finds_its_jobs_alone(browser: Client, ada: User) -> None:
    for name, tags in (("one", ["lora"]), ("two", ["lora 2"]), ("three", [])):
        Job.objects.filter(pk=rows.make_job(ada, name=name).pk).update(tags=tags)
    assert names(browser, "tag=lora") == ["one"]
    assert names(browser, "tag=%22") == []


def test_a_list_shows_what_the_loss_did(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    Sample.objects.bulk_create(
        Sample(job=job, attempt=1, kind="step", step=step, data={}, loss=5.0 - step / 100) for step in range(1, 101)
    )
    Job.objects.filter(pk=job.pk).update(step=100)
    (row,) = browser.get("/jobs/").context["jobs"]
    assert 20 <= row["spark"].count(",") <= 51
    assert spark_points([1.0, 1.0]) == "0.0,12.0 72.0,12.0"
    assert spark_points([2.0, 1.0]) == "0.0,2.0 72.0,22.0"


def test_a_view_is_kept_under_a_name_and_forgotten(browser: Client, ada: User) -> None:
    browser.post("/jobs/filters/", {"name": "best", "query": "sort=loss&tag=lora"})
    assert 'href="/jobs/?sort=loss&amp;tag=lora">best' in browser.get("/jobs/").content.decode()
    browser.post("/jobs/filters/", {"name": "best", "query": "sort=-speed"})
    assert SavedFilter.objects.get().query == "sort=-speed"
    browser.post("/jobs/filters/", {"forget": "best"})
    assert not SavedFilter.objects.exists()
    answer = browser.post("/jobs/filters/", {"name": " ", "query": ""}, follow=True)
    assert "The name is empty" in answer.content.decode()


def test_chosen_jobs_are_deleted_together_and_had_back_by_undo(browser: Client, ada: User) -> None:
    jobs = [ended(ada, name=name) for name in "ab"]
    ids = [job.pk for job in jobs]
    answer = browser.post("/jobs/bulk/", {"job": ids, "action": "delete"}, follow=True)
    text = answer.content.decode()
    assert "Deleted 2 jobs" in text
    assert names(browser, "") == []
    browser.post("/jobs/bulk/", {"job": ids, "action": "restore"})
    assert names(browser, "sort=name") == ["a", "b"]


def test_what_cannot_be_done_to_one_is_said_and_done_to_the_others(browser: Client, ada: User) -> None:
    waits, over = rows.make_job(ada, name="waits"), ended(ada, name="over")
    answer = browser.post("/jobs/bulk/", {"job": [waits.pk, over.pk], "action": "delete"}, follow=True)
    assert "Cannot delete job" in answer.content.decode()
    assert names(browser, "") == ["waits"]
    assert "Choose one or more jobs first" in browser.post("/jobs/bulk/", {"action": "delete"}, follow=True).content.decode()


def test_chosen_jobs_are_tagged_stopped_and_compared(browser: Client, ada: User) -> None:
    ids = [rows.make_job(ada, name=name).pk for name in "ab"]
    browser.post("/jobs/bulk/", {"job": ids, "action": "tag", "tag": "night"})
    assert sorted(names(browser, "tag=night")) == ["a", "b"]
    browser.post("/jobs/bulk/", {"job": ids, "action": "cancel"})
    assert set(Job.objects.values_list("state", flat=True)) == {"cancelled"}
    answer = browser.post("/jobs/bulk/", {"job": ids, "action": "compare"})
    assert answer["Location"] == f"/jobs/compare/?job={ids[0]}&job={ids[1]}"


def test_jobs_of_others_are_not_touched(browser: Client) -> None:
    job = ended(make_person("mallory"), name="secret")
    browser.post("/jobs/bulk/", {"job": [job.pk], "action": "delete"})
    job.refresh_from_db()
    assert job.deleted_at is None


def test_a_job_is_described_and_deleted_from_its_own_page(browser: Client, ada: User) -> None:
    job = ended(ada)
    browser.post(f"/jobs/{job.pk}/about/", {"name": "new name", "tags": "a, b", "notes": "why"})
    text = browser.get(f"/jobs/{job.pk}/").content.decode()
    assert "new name" in text
    assert 'href="/jobs/?tag=a">a</a>' in text
    answer = browser.post(f"/jobs/{job.pk}/delete/", follow=True)
    assert "Deleted new name" in answer.content.decode()
    assert browser.get(f"/jobs/{job.pk}/").status_code == 404
    assert browser.post(f"/jobs/{job.pk}/restore/")["Location"] == f"/jobs/{job.pk}/"
