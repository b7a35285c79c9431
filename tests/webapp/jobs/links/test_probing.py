"""Probes as rows: due when somebody asks and a day later, offered only between idle machines, taken by the other side alone."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from tests.webapp.conftest import make_bench
from webapp.attempts.claiming import claim_job
from webapp.catalog.models import Link, Machine
from webapp.jobs.links.probing import (
    ask_for_links,
    close_offer,
    find_due,
    find_offer,
    open_offer,
    record_failure,
    record_measured,
)
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db

WHERE: dict[str, Any] = {"address": "127.0.0.1", "port": 4000, "interface": "lo", "computer": "this"}
FOUND: dict[str, Any] = {"round_trip_s": 0.002, "bytes_per_s_by_size": ((65536, 5e7), (16777216, 1e8))}


@pytest.fixture
def pair() -> tuple[Machine, Machine]:
    """The one that listens first."""
    first, second = sorted((make_bench("home"), make_bench("office")), key=lambda row: row.pk)
    return first, second


@pytest.fixture
def link(pair: tuple[Machine, Machine]) -> Link:
    assert ask_for_links(pair[1]) == 1
    return Link.objects.get()


def later(**ago: float) -> None:
    """Every moment of the link is so long ago."""
    Link.objects.update(checked_at=timezone.now() - timedelta(**ago))


def test_of_each_two_machines_one_listens_whoever_asks(pair: tuple[Machine, Machine]) -> None:
    make_bench("attic")
    for machine in pair:
        assert ask_for_links(machine) == 2
    assert Link.objects.count() == 3
    assert all(link.listener_id < link.connector_id for link in Link.objects.all())


def test_a_probe_is_due_when_asked_for_and_a_day_after_the_last(pair: tuple[Machine, Machine], link: Link) -> None:
    first, second = pair
    assert find_due(first) == [link]
    assert find_due(second) == []
    record_measured(link, **FOUND)
    assert find_due(first) == []
    later(hours=23)
    assert find_due(first) == []
    later(hours=25)
    assert find_due(first) == [link]
    record_failure(link, "office cannot reach home")
    assert find_due(first) == []
    later(seconds=40)
    assert find_due(first) == [link]
    ask_for_links(second)
    assert find_due(first) == [link]


def test_nothing_is_measured_with_a_machine_that_is_away_or_at_work(
    pair: tuple[Machine, Machine], link: Link, make_job: Callable[..., Job]
) -> None:
    first, second = pair
    for changes in ({"draining": True}, {"last_seen_at": timezone.now() - timedelta(seconds=20)}):
        Machine.objects.filter(pk=second.pk).update(**changes)
        assert find_due(first) == []
        Machine.objects.filter(pk=second.pk).update(draining=False, last_seen_at=timezone.now())
    assert find_due(first) == [link]
    make_job(machine=second)
    assert claim_job(worker="w", machine=second) is not None
    assert find_due(first) == []
    assert open_offer(link, **WHERE)
    assert find_offer(second) is None


def test_an_offer_is_for_the_other_side_once_and_its_token_ends_with_it(pair: tuple[Machine, Machine], link: Link) -> None:
    first, second = pair
    offer = open_offer(link, **WHERE)
    assert offer is not None
    assert len(offer["token"]) == 64
    assert open_offer(link, **WHERE) is None
    assert find_offer(first) is None
    assert find_offer(second).offer == offer
    record_measured(link, **FOUND)
    link.refresh_from_db()
    assert (link.offer, link.offer_ends_at, link.asked_at, link.failure) == (None, None, None, "")
    assert link.bytes_per_s_by_size == [[65536, 5e7], [16777216, 1e8]]
    again = open_offer(link, **WHERE)
    assert again["token"] != offer["token"]
    close_offer(link)
    assert find_offer(second) is None


def test_an_offer_that_nobody_took_in_time_is_over(pair: tuple[Machine, Machine], link: Link) -> None:
    open_offer(link, **WHERE)
    Link.objects.update(offer_ends_at=timezone.now() - timedelta(seconds=1))
    assert find_offer(pair[1]) is None
    assert open_offer(link, **WHERE)


def test_what_was_measured_stays_when_a_later_probe_fails(link: Link) -> None:
    record_measured(link, **FOUND)
    record_failure(link, "x" * 5000)
    link.refresh_from_db()
    assert (link.round_trip_s, len(link.failure)) == (0.002, 1000)
