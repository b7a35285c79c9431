"""``/metrics`` shows its numbers to those who may see them, and Prometheus' own parser reads it."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from webapp.accounts.models import Scope
from webapp.accounts.tokens import create_token
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_samples, record_started
from webapp.catalog.models import Machine
from webapp.jobs.models import Job


@pytest.fixture
def scraper(settings: Settings, db: None) -> Client:
    settings.HEADROOM_METRICS_TOKEN = "scrape me"
    return Client(headers={"Authorization": "Bearer scrape me"})


def scrape(client: Client) -> dict[tuple[str, ...], Any]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.content.decode())
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def test_it_counts_jobs_the_queue_workers_memory_and_samples(
    scraper: Client, make_job: Callable[..., Job], machine: Machine
) -> None:
    make_job()
    make_job()
    attempt = claim_job(worker="w", machine=machine)
    record_started(attempt, pid=1)
    record_samples(attempt, [{"kind": "step", "step": 1, "loss": 1.0}])
    found = scrape(scraper)
    assert found["headroom_jobs", "queued", "train"] == 1
    assert found["headroom_jobs", "running", "train"] == 1
    assert found["headroom_jobs", "failed", "generate"] == 0
    assert found["headroom_queue_depth",] == 1
    assert 0 <= found["headroom_queue_oldest_age_seconds",] < 60
    assert found["headroom_worker_online", "bench", "cpu"] == 1
    assert found["headroom_device_memory_bytes", "bench", "cpu"] == 8 * 1024**3
    assert found["headroom_device_memory_reserved_bytes", "bench", "cpu"] == attempt.job.need_device_bytes
    assert found["headroom_samples_stored_total",] >= 1
    assert found["headroom_stream_viewers",] == 0


def test_it_counts_requests_by_route_and_never_by_what_was_sent(scraper: Client, ada: User) -> None:
    client = Client()
    key = ("headroom_http_requests_total", *sorted(("GET", "/jobs/<slug:job_id>/", "302")))
    before = scrape(scraper).get(key, 0)
    for name in ("job_one", "job_two"):
        client.get(f"/jobs/{name}/")
    found = scrape(scraper)
    assert found[key] - before == 2
    assert not any("job_one" in label for labels in found for label in labels)


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Basic scrape me", "Bearer "])
def test_a_stranger_sees_nothing(scraper: Client, header: str) -> None:
    answer = Client(headers={"Authorization": header} if header else {}).get("/metrics")
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")


def test_without_a_token_in_the_settings_an_empty_one_opens_nothing(db: None, settings: Settings) -> None:
    settings.HEADROOM_METRICS_TOKEN = ""
    assert Client(headers={"Authorization": "Bearer "}).get("/metrics").status_code == 401


def test_an_administrators_token_opens_it_and_another_persons_does_not(ada: User, admin: User) -> None:
    for person, status in ((admin, 200), (ada, 403)):
        _, text = create_token(user=person, name="t", scope=Scope.READ)
        assert Client(headers={"Authorization": f"Bearer {text}"}).get("/metrics").status_code == status
