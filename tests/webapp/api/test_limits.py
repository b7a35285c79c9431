"""Limits by person and by project answer 429, name themselves and say when to try again; they hold with and without Redis."""

from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from tests.valkey import Valkey
from tests.webapp.conftest import make_spec
from webapp.accounts.errors import LimitReached
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job
from webapp.planning.submitting import submit_job


@pytest.mark.parametrize("has_redis", [True, False])
def test_requests_past_a_person_s_limit_are_429_and_others_go_on(
    as_ada: Client, as_eve: Client, settings: Settings, has_redis: bool, request: pytest.FixtureRequest
) -> None:
    if has_redis:
        request.getfixturevalue("valkey")
    settings.HEADROOM_MAX_REQUESTS_PER_MINUTE = 3
    # seven, because a minute may end among them
    answers = [as_ada.get("/api/v1/me") for _ in range(7)]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["code"] == "limit_reached"
    assert refused.json()["detail"] == "you have sent 3 requests to the API in this minute; allowed: at most that"
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert as_eve.get("/api/v1/me").status_code == 200


def test_web_processes_count_together(valkey: Valkey, db: None) -> None:
    from webapp.wire.counting import _Counter

    first, second = _Counter(valkey.url), _Counter(valkey.url)
    counts = [counter.count("requests:1") for counter in (first, second, first, second, first)]
    assert max(counts) >= 3  # of five, wherever the minute ends
    valkey.kill()
    assert first.count("requests:1") >= 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("HEADROOM_MAX_QUEUED_PER_PERSON", "you have 2 jobs that wait; allowed: at most 2"),
        ("HEADROOM_MAX_QUEUED_PER_PROJECT", "project ada has 2 jobs that wait; allowed: at most 2"),
    ],
)
def test_a_job_past_the_queue_s_room_is_refused_by_the_limit_s_name(
    ada: User, model: Model, dataset: Dataset, make_job: Callable[..., Job], settings: Settings, setting: str, words: str
) -> None:
    setattr(settings, setting, 2)
    make_job()
    make_job()
    with pytest.raises(LimitReached) as refused:
        submit_job(ada, spec=make_spec(model, dataset), actor="test")
    assert refused.value.message == words
    assert refused.value.fields["limit"] == setting
