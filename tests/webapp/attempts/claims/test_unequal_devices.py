"""Jobs whose plans name their devices, on a machine with devices of several kinds: each rank on its own kind, all or none."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.units import GIB
from tests.webapp.attempts.claims.test_gangs import claim, end
from tests.webapp.conftest import MACHINE_DOCUMENT
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Machine
from webapp.catalog.queries import most_devices
from webapp.jobs.devices.named import NAMED, RankNeed, write_needs
from webapp.jobs.devices.needs import needs_of
from webapp.jobs.devices.room import read_room
from webapp.jobs.fleet import read_occupancy
from webapp.jobs.models import Job
from webapp.jobs.queue import read_queue

SMALL, LARGE = "RTX 3060", "RTX 4090"
Need = Callable[..., Job]


def card(name: str, memory_bytes: int) -> dict[str, Any]:
    return {**MACHINE_DOCUMENT["device"], "kind": "cuda", "name": name, "memory_bytes": memory_bytes}


@pytest.fixture
def host(db: None) -> Machine:
    """Two small cards, whose places are 0 and 1, and a large one, whose place is 2."""
    large = {"device": card(LARGE, 24 * GIB), "rates": MACHINE_DOCUMENT["rates"], "num_devices": 1}
    document = {**MACHINE_DOCUMENT, "device": card(SMALL, 12 * GIB), "num_devices": 2, "others": [large]}
    return register_machine(name="host", document=document)


@pytest.fixture
def need(make_job: Callable[..., Job]) -> Need:
    """A queued job of these devices, each with so many GiB."""

    def need(*ranks: tuple[str, int], **changes: Any) -> Job:
        job = make_job(**changes)
        needs = [RankNeed(name, size * GIB) for name, size in ranks]
        fields = {"need_devices": len(needs), "need_device_bytes": max(each.num_bytes for each in needs)}
        Job.objects.filter(pk=job.pk).update(
            **fields, need_device_kind=NAMED, need_ranks=write_needs(needs), prediction={}
        )
        return Job.objects.get(pk=job.pk)

    return need


def test_each_rank_gets_a_device_of_its_kind_in_the_order_of_the_ranks(host: Machine, need: Need) -> None:
    job = need((LARGE, 20), (SMALL, 5), (SMALL, 10))
    assert claim(host) == (job.pk, [2, 1, 0])
    assert [device.free_bytes // GIB for device in read_room(host).devices] == [2, 7, 4]


def test_a_job_planned_for_the_large_card_never_gets_a_small_one(host: Machine, need: Need) -> None:
    first, second = need((LARGE, 4)), need((LARGE, 21))
    assert claim(host) == (first.pk, [2])
    assert claim(host) is None
    end(first)
    assert claim(host) == (second.pk, [2])


def test_a_job_planned_for_a_small_card_is_not_claimed_on_the_large_one(host: Machine, need: Need) -> None:
    jobs = [need((SMALL, 11)) for _ in range(3)]
    assert [claim(host), claim(host), claim(host)] == [(jobs[0].pk, [0]), (jobs[1].pk, [1]), None]


def test_devices_of_unequal_kinds_are_claimed_all_or_none_and_kept_meanwhile(host: Machine, need: Need) -> None:
    first, wide, later, other = (
        need((SMALL, 11)),
        need((LARGE, 20), (SMALL, 11), (SMALL, 11)),
        need((LARGE, 2)),
        need((SMALL, 1)),
    )
    assert claim(host) == (first.pk, [0])
    assert claim(host) is None
    end(first)
    attempt = claim(host)
    assert attempt == (wide.pk, [2, 0, 1])
    assert (claim(host), claim(host)) == ((later.pk, [2]), (other.pk, [0]))


def test_what_stands_behind_may_use_a_device_that_the_wide_job_does_not_name(host: Machine, need: Need) -> None:
    first, wide, later = need((LARGE, 20)), need((LARGE, 20), (SMALL, 5)), need((SMALL, 12))
    assert claim(host) == (first.pk, [2])
    assert claim(host) == (later.pk, [1])
    end(first)
    assert claim(host) == (wide.pk, [2, 0])


def test_a_job_that_names_no_device_goes_where_there_is_room_for_it(
    host: Machine, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    Job.objects.filter(pk=job.pk).update(need_device_kind="cuda", need_device_bytes=20 * GIB)
    assert claim(host) == (job.pk, [2])


def test_a_machine_with_devices_of_one_kind_leaves_such_a_job_alone(need: Need) -> None:
    plain = register_machine(
        name="plain", document={**MACHINE_DOCUMENT, "device": card(SMALL, 64 * GIB), "num_devices": 4}
    )
    need((SMALL, 1), (LARGE, 1))
    assert claim(plain) is None


def test_the_queue_names_the_devices_that_are_missing(host: Machine, need: Need, ada: User) -> None:
    first = need((LARGE, 20), owner=ada)
    assert claim(host) == (first.pk, [2])
    need((SMALL, 5), (LARGE, 20), (SMALL, 5), owner=ada)
    need((LARGE, 30), owner=ada)
    wide, huge = read_queue(ada).waiting
    assert wide.reason == "busy"
    assert wide.sentence == (
        "It needs 2x RTX 3060 with 5.00 GiB and RTX 4090 with 20.0 GiB at once; free on host: RTX 3060 has 12.0 GiB, "
        "RTX 3060 has 12.0 GiB, RTX 4090 has 4.00 GiB."
    )
    assert huge.reason == "no_machine"
    assert huge.sentence.startswith("It needs RTX 4090 with 30.0 GiB in one machine; no known machine has one ")


def test_bytes_of_a_job_are_counted_as_each_of_its_devices_holds_them(host: Machine, need: Need, ada: User) -> None:
    need((LARGE, 20), (SMALL, 5), owner=ada)
    claim(host)
    found = read_occupancy(ada, host)
    assert [holder.needs_bytes for holder in found.holders] == [25 * GIB]
    assert (found.memory_bytes, found.free_bytes, found.num_devices) == (48 * GIB, 23 * GIB, 3)
    assert most_devices(ada) == 3


def test_a_rank_needs_its_predicted_peak_within_the_budget_and_its_device(host: Machine) -> None:
    ranks = [{"device": LARGE, "peak_high_bytes": 20 * GIB}, {"device": SMALL, "peak_high_bytes": 5 * GIB}]
    asked: dict[str, Any] = {"plan": {"layout": {"ranks": [{}, {}]}}, "prediction": {"ranks": ranks}}
    large, small = needs_of(**asked, machine=host.document, budget_bytes=None)
    assert (large.device, small.device) == (LARGE, SMALL)
    assert large.num_bytes >= 20 * GIB > 8 * GIB > small.num_bytes >= 5 * GIB
    assert needs_of(**asked, machine=host.document, budget_bytes=4 * GIB)[0].num_bytes < 8 * GIB
    assert needs_of({"layout": {"num_devices": 2}}, {}, machine=host.document, budget_bytes=None) == []
