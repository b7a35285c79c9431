"""Jobs of several devices: all or none, in the queue's order, and what the queue says of them."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.units import GIB
from tests.webapp.conftest import MACHINE_DOCUMENT
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_started
from webapp.catalog.actions import heartbeat_machine, register_machine
from webapp.catalog.models import Machine
from webapp.jobs.actions import pause_job, set_priority
from webapp.jobs.devices.room import DESKTOP_BYTES, read_room
from webapp.jobs.models import Attempt, Job, Kind
from webapp.jobs.queue import read_queue

DEVICE_BYTES = 8 * GIB
WHOLE: dict[str, Any] = {"step_ms": 10.0, "busy_by_kind_ms": {"matmul": 9.5}}
"""Lanes of a job that leaves a device nothing."""
DONE = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 1}
Need = Callable[..., Job]


def make_host(num_devices: int, *, kind: str = "cuda", name: str = "host") -> Machine:
    device = {**MACHINE_DOCUMENT["device"], "kind": kind, "memory_bytes": DEVICE_BYTES}
    return register_machine(name=name, document={**MACHINE_DOCUMENT, "device": device, "num_devices": num_devices})


@pytest.fixture
def cards(db: None) -> Machine:
    """Two cards with memory of their own."""
    return make_host(2)


@pytest.fixture
def need(make_job: Callable[..., Job]) -> Need:
    """A queued job of so many devices."""

    def need(num_devices: int, *, need_bytes: int = 5 * GIB, kind: str = "cuda", **changes: Any) -> Job:
        job = make_job(**changes)
        fields = {"need_devices": num_devices, "need_device_bytes": need_bytes, "need_device_kind": kind, "prediction": WHOLE}
        Job.objects.filter(pk=job.pk).update(**fields)
        return Job.objects.get(pk=job.pk)

    return need


def claim(machine: Machine, **arguments: Any) -> tuple[str, list[int]] | None:
    """The job that is next, and its devices."""
    attempt = claim_job(worker="w", machine=machine, **arguments)
    return None if attempt is None else (attempt.job_id, attempt.devices)


def end(job: Job) -> None:
    attempt = Attempt.objects.get(job=job)
    record_started(attempt, pid=1)
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"


def test_two_narrow_jobs_get_a_device_each_and_a_wide_one_both_afterwards(cards: Machine, need: Need) -> None:
    first, second, wide = need(1), need(1), need(2)
    assert claim(cards) == (first.pk, [0])
    assert claim(cards) == (second.pk, [1])
    end(first)
    assert claim(cards) is None
    end(second)
    assert claim(cards) == (wide.pk, [0, 1])
    fences = list(Attempt.objects.filter(job=wide).values_list("fence", flat=True))
    assert len(fences) == 1


def test_a_wide_job_keeps_its_devices_from_narrow_ones_behind_it(cards: Machine, need: Need) -> None:
    first, wide, later = need(1), need(2), need(1, need_bytes=GIB)
    assert claim(cards) == (first.pk, [0])
    assert claim(cards) is None
    end(first)
    assert claim(cards) == (wide.pk, [0, 1])
    assert claim(cards) == (later.pk, [0])


def test_devices_beyond_those_that_it_waits_for_stay_in_use(need: Need) -> None:
    host = make_host(3)
    first, second = need(1), need(1, need_bytes=6 * GIB)
    wide, later, last = need(2), need(1, need_bytes=GIB), need(1)
    assert claim(host) == (first.pk, [0])
    assert claim(host) == (second.pk, [1])
    # it waits for the second and, as the nearer of the two in use, for the first
    assert claim(host) == (later.pk, [1])
    assert claim(host) is None
    end(first)
    assert claim(host) == (wide.pk, [0, 2])
    end(second)
    assert claim(host) == (last.pk, [1])


def test_a_narrow_job_of_higher_priority_goes_first(cards: Machine, need: Need) -> None:
    first, _, urgent = need(1), need(2), need(1)
    assert claim(cards) == (first.pk, [0])
    set_priority(urgent, 5, actor="test", may_overtake=True)
    assert claim(cards) == (urgent.pk, [1])


def test_profiles_need_no_device_and_wait_for_none(cards: Machine, need: Need) -> None:
    first, _ = need(1), need(2)
    claim(cards)
    profile = need(1, need_bytes=0, kind="")
    Job.objects.filter(pk=profile.pk).update(kind=Kind.PROFILE)
    assert claim(cards) == (profile.pk, [])
    assert first.pk != profile.pk


def test_a_wide_job_that_may_not_start_keeps_nothing(cards: Machine, need: Need) -> None:
    need(1)
    claim(cards)
    paused, awaiting, later = need(2), need(2), need(1)
    pause_job(paused, actor="test")
    Job.objects.filter(pk=awaiting.pk).update(awaits_plan=True)
    assert claim(cards) == (later.pk, [1])


@pytest.mark.parametrize(("num_devices", "need_bytes"), [(3, GIB), (2, 9 * GIB)])
def test_a_job_that_the_machine_could_never_hold_keeps_nothing(
    cards: Machine, need: Need, num_devices: int, need_bytes: int
) -> None:
    need(num_devices, need_bytes=need_bytes)
    later = need(1)
    assert claim(cards) == (later.pk, [0])


def test_devices_that_other_programs_hold_are_waited_for_by_nobody(cards: Machine, need: Need) -> None:
    need(2)
    later = need(1)
    assert claim(cards, used_bytes=[0, DESKTOP_BYTES + 4 * GIB]) == (later.pk, [0])


def test_a_wide_job_that_would_only_take_turns_keeps_its_devices(cards: Machine, need: Need) -> None:
    first, wide, later = need(1, need_bytes=GIB), need(2, need_bytes=GIB), need(1, need_bytes=GIB)
    assert claim(cards, must_gain=True) == (first.pk, [0])
    assert claim(cards, must_gain=True) is None
    end(first)
    assert claim(cards, must_gain=True) == (wide.pk, [0, 1])
    end(wide)
    assert claim(cards, must_gain=True) == (later.pk, [0])


def test_a_job_that_would_only_take_turns_leaves_an_idle_device_that_is_too_small_for_it(
    ada: User, cards: Machine, need: Need
) -> None:
    used_bytes = [0, DESKTOP_BYTES + 4 * GIB]  # another program is on the second card
    first, large, small = need(1, need_bytes=GIB), need(1, need_bytes=6 * GIB), need(1, need_bytes=2 * GIB)
    assert claim(cards, must_gain=True, used_bytes=used_bytes) == (first.pk, [0])
    heartbeat_machine(cards, used_bytes=used_bytes)
    waiting = next(each for each in read_queue(ada).waiting if each.job.pk == large.pk)
    assert waiting.sentence == (
        "It fits beside what runs on host, and joins it if that gets more done; otherwise it waits for a device."
    )
    assert claim(cards, must_gain=True, used_bytes=used_bytes) == (small.pk, [1])
    assert claim(cards, must_gain=True, used_bytes=used_bytes) is None
    end(first)
    assert claim(cards, must_gain=True, used_bytes=used_bytes) == (large.pk, [0])


def test_devices_that_the_cpu_plays_share_one_memory(need: Need) -> None:
    host = make_host(2, kind="cpu")
    wide, narrow = need(2, need_bytes=4 * GIB, kind="cpu"), need(1, need_bytes=GIB, kind="cpu")
    assert claim(host) == (wide.pk, [0, 1])
    assert claim(host) is None
    assert read_room(host).free_bytes == 0
    end(wide)
    assert claim(host) == (narrow.pk, [0])
    assert read_room(host).free_bytes == 7 * GIB


def test_two_jobs_of_one_processor_disturb_each_other_on_devices_of_their_own(need: Need) -> None:
    host = make_host(2, kind="cpu")
    first, second = need(1, need_bytes=GIB, kind="cpu"), need(1, need_bytes=GIB, kind="cpu")
    assert claim(host, must_gain=True) == (first.pk, [0])
    assert claim(host, must_gain=True) == (second.pk, [1])
    assert set(Attempt.objects.values_list("is_shared", flat=True)) == {True}


def test_two_cards_leave_each_other_alone(cards: Machine, need: Need) -> None:
    need(1)
    need(1)
    claim(cards)
    claim(cards)
    assert set(Attempt.objects.values_list("is_shared", flat=True)) == {False}


def test_devices_that_the_cpu_plays_share_its_cores_and_a_job_on_another_one_is_announced(
    need: Need, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    host = make_host(2, kind="cpu")
    first, second = (need(1, need_bytes=GIB, kind="cpu") for _ in range(2))
    with django_capture_on_commit_callbacks(execute=True):
        assert [claim(host), claim(host)] == [(first.pk, [0]), (second.pk, [1])]
    said = first.events.get(kind="shared").message
    assert said == f"{second.pk} began on the same machine, whose processor both use"


def test_the_queue_says_what_a_wide_job_waits_for_and_what_waits_for_it(ada: User, cards: Machine, need: Need) -> None:
    need(1)
    claim(cards)
    wide, later = need(2), need(1)
    said = {each.job.pk: (each.reason, each.sentence) for each in read_queue(ada).waiting}
    assert said[wide.pk] == ("busy", "It needs 2 devices with 5.00 GiB each at once; 1 is free on host.")
    assert said[later.pk] == (
        "busy", "The free devices of host are kept for a job ahead of it that needs 2 at once."
    )  # fmt: skip


def test_the_queue_says_that_no_machine_has_so_many_devices(ada: User, cards: Machine, need: Need) -> None:
    need(3)
    (waiting,) = read_queue(ada).waiting
    assert waiting.reason == "no_machine"
    assert waiting.sentence == (
        "It needs 3 cuda devices of one machine with 5.00 GiB each; no known machine has them (the largest is host, cuda, "
        "2 devices, 16.0 GiB). Clone it with fewer devices or a smaller budget, or start a worker on a larger machine."
    )


def test_a_machine_that_was_registered_before_devices_were_counted_has_one(machine: Machine, need: Need) -> None:
    assert "num_devices" not in machine.document
    narrow = need(1, kind="cpu")
    need(2, need_bytes=GIB, kind="cpu")
    assert claim(machine) == (narrow.pk, [0])
    assert claim(machine) is None
