"""The lead among reconcilers, and the alarm where none works."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.test import Client
from pytest_django import Settings

from tests.webapp.attempts.attempts import run
from webapp.attempts.leading import find_alarm, is_unbroken_for, record_pass, release_lead, take_lead
from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.models import Job, Lead


@pytest.mark.django_db
def test_the_lead_is_one_holders_until_its_term_ends_or_it_is_released() -> None:
    assert take_lead("a", term_s=60, gap_s=10)
    assert not take_lead("b", term_s=60, gap_s=10)
    assert take_lead("a", term_s=60, gap_s=10)
    release_lead("b")
    assert not take_lead("b", term_s=60, gap_s=10)
    Lead.objects.update(held_until=from_now(-1))
    assert take_lead("b", term_s=60, gap_s=10)
    release_lead("b")
    Lead.objects.update(held_until=from_now(-0.001))  # a test's transaction has but one moment on PostgreSQL
    assert take_lead("a", term_s=60, gap_s=10)


@pytest.mark.django_db
def test_a_clock_that_was_set_back_leaves_no_leader_for_ever() -> None:
    take_lead("a", term_s=10, gap_s=10)
    Lead.objects.update(held_until=from_now(3600))
    assert take_lead("b", term_s=10, gap_s=10)


@pytest.mark.django_db
@pytest.mark.parametrize(("silent_s", "is_unbroken"), [(12, True), (16, False)])
def test_only_a_gap_in_which_leases_may_have_been_lost_breaks_the_lead(silent_s: int, *, is_unbroken: bool) -> None:
    take_lead("a", term_s=10, gap_s=15)
    Lead.objects.update(unbroken_since=from_now(-100), held_until=from_now(10 - silent_s))
    assert take_lead("b", term_s=10, gap_s=15)
    assert is_unbroken_for(50) is is_unbroken


def lead(*, acted_s_ago: float) -> None:
    take_lead("a", term_s=60, gap_s=10)
    record_pass("a")
    Lead.objects.update(acted_at=from_now(-acted_s_ago))


@pytest.fixture
def lost_job(make_job: Callable[..., Job], machine: Machine) -> Job:
    """A job whose lease has run out."""
    job = make_job()
    run(machine, lease_s=-1)
    return job


def test_a_lost_job_that_nobody_looks_after_is_an_alarm(lost_job: Job) -> None:
    assert " has not worked since this service began. Lost jobs: 1; waiting jobs: 0. " in find_alarm()
    lead(acted_s_ago=30)
    assert find_alarm() == ""
    lead(acted_s_ago=125)
    assert " has not worked for 2 min. Lost jobs: 1; waiting jobs: 0. " in find_alarm()


def test_a_job_that_waits_without_a_reconciler_is_an_alarm_and_one_that_runs_is_none(lost_job: Job) -> None:
    Job.objects.update(lease_until=from_now(30))
    assert find_alarm() == ""
    Job.objects.update(state="queued", lease_until=None)
    assert find_alarm() == ""
    Job.objects.update(created_at=from_now(-61))
    assert "Lost jobs: 0; waiting jobs: 1" in find_alarm()
    Job.objects.update(state="succeeded", finished_at=Now())
    assert find_alarm() == ""


def test_the_alarm_is_on_every_page_in_readyz_and_in_the_metrics(lost_job: Job, ada: User, settings: Settings) -> None:
    settings.HEADROOM_METRICS_TOKEN = "scrape me"
    assert seen_in(ada) == {"page": True, "readyz": "silent: jobs of lost workers are not given back", "metrics": True}
    assert "headroom_leases_expired 1.0" in scrape()
    lead(acted_s_ago=0)
    assert seen_in(ada) == {"page": False, "readyz": "ok", "metrics": False}


def seen_in(user: User) -> dict[str, object]:
    stranger, client = Client(), Client()
    client.force_login(user)
    assert "The reconciler" not in stranger.get("/login/").content.decode()
    return {
        "page": "The reconciler, which starts" in client.get("/machines/").content.decode(),
        "readyz": stranger.get("/readyz").json()["reconciler"],
        "metrics": "headroom_reconciler_alarm 1.0" in scrape(),
    }


def scrape() -> str:
    return Client(headers={"Authorization": "Bearer scrape me"}).get("/metrics").content.decode()
