"""The queue: its order is the claim's, and each job says why it waits."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.base.errors import InvalidInput
from tests.webapp.conftest import make_bench
from webapp.attempts.claiming import claim_job
from webapp.catalog.models import Machine
from webapp.jobs.actions import pause_job, set_priority
from webapp.jobs.errors import JobConflict
from webapp.jobs.models import Job, Kind
from webapp.jobs.queue import Waiting, read_queue

pytestmark = pytest.mark.django_db
GIB = 1024**3


def need(job: Job, num_bytes: int, kind: str = "cpu") -> Job:
    Job.objects.filter(pk=job.pk).update(need_device_bytes=num_bytes, need_device_kind=kind)
    return job


def only(user: User) -> Waiting:
    (waiting,) = read_queue(user).waiting
    return waiting


def test_jobs_stand_in_the_order_in_which_they_are_claimed(
    ada: User, machine: Machine, make_job: Callable[..., Job]
) -> None:
    jobs = [make_job() for _ in range(4)]
    set_priority(jobs[2], 7, actor="test", may_overtake=True)
    set_priority(jobs[0], -1, actor="test", may_overtake=False)
    shown = [each.job.pk for each in read_queue(ada).waiting]
    claimed = [claim_job(worker="w", machine=machine).job_id for _ in jobs]
    assert shown == claimed == [jobs[index].pk for index in (2, 1, 3, 0)]


def test_places_count_other_people_s_jobs_and_name_none_of_them(
    ada: User, eve: User, make_job: Callable[..., Job]
) -> None:
    make_job(owner=eve)
    mine = make_job()
    queue = read_queue(ada)
    assert [(each.job.pk, each.position) for each in queue.waiting] == [(mine.pk, 2)]
    assert queue.num_waiting == 2


def claim_owners(machine: Machine, count: int) -> list[str]:
    return [claim_job(worker="w", machine=machine).job.owner.username for _ in range(count)]


def test_people_take_turns_however_many_one_of_them_submits(
    ada: User, eve: User, machine: Machine, make_job: Callable[..., Job]
) -> None:
    for _ in range(6):
        make_job()
    assert claim_owners(machine, 2) == ["ada", "ada"]
    for _ in range(3):
        make_job(owner=eve)
    assert claim_owners(machine, 7) == ["ada", "eve", "ada", "eve", "ada", "eve", "ada"]


def test_a_paused_job_gives_newcomers_no_lead(ada: User, eve: User, machine: Machine, make_job: Callable[..., Job]) -> None:
    pause_job(make_job(), actor="test")
    for _ in range(4):
        make_job()
    claim_owners(machine, 2)
    for _ in range(2):
        make_job(owner=eve)
    assert claim_owners(machine, 4) == ["ada", "eve", "ada", "eve"]


def test_a_profile_stands_before_all_jobs_that_wait(ada: User, machine: Machine, make_job: Callable[..., Job]) -> None:
    for _ in range(3):
        make_job()
    profile = make_job(kind=Kind.PROFILE)
    assert claim_job(worker="w", machine=machine).job_id == profile.pk


def test_each_page_of_the_queue_goes_on_where_the_one_before_ended(
    ada: User, eve: User, machine: Machine, make_job: Callable[..., Job]
) -> None:
    for index in range(12):
        make_job(owner=eve if index % 3 == 0 else ada)
    pages = [read_queue(ada, page=page, page_size=3) for page in (1, 2, 3, 4)]
    shown = [(each.position, each.job.pk) for page in pages for each in page.waiting]
    claimed = [claim_job(worker="w", machine=machine).job for _ in range(12)]
    assert shown == [(place, job.pk) for place, job in enumerate(claimed, start=1) if job.owner == ada]
    assert [(page.num_own, page.num_waiting) for page in pages] == [(8, 12)] * 4


def test_a_job_that_nothing_holds_up_is_next(ada: User, make_job: Callable[..., Job]) -> None:
    make_job()
    assert (only(ada).reason, only(ada).machines) == ("next", ("bench",))


def test_a_paused_job_says_so(ada: User, make_job: Callable[..., Job]) -> None:
    pause_job(make_job(), actor="test")
    assert only(ada).reason == "paused"


def test_a_failed_attempt_s_wait_is_shown(ada: User, make_job: Callable[..., Job]) -> None:
    Job.objects.filter(pk=make_job().pk).update(not_before=timezone.now() + timedelta(seconds=90), attempt=1)
    assert only(ada).reason == "not_yet"
    assert "Attempt 1 failed; the next one may start in" in only(ada).sentence


def test_what_no_machine_can_hold_names_the_largest_there_is(ada: User, make_job: Callable[..., Job]) -> None:
    need(make_job(), 9 * GIB)
    assert only(ada).reason == "no_machine"
    wanted = "It needs a cpu device with 9.00 GiB; no known machine has one (the largest is bench, cpu, 8.00 GiB)"
    assert only(ada).sentence.startswith(wanted)


def test_a_machine_that_is_offline_or_drains_is_named(
    ada: User, machine: Machine, make_job: Callable[..., Job]
) -> None:
    make_job()
    for change in ({"last_seen_at": timezone.now() - timedelta(hours=1)}, {"last_seen_at": timezone.now(), "draining": True}):
        Machine.objects.filter(pk=machine.pk).update(**change)
        assert only(ada).reason == "offline"
        assert "Only bench could hold it" in only(ada).sentence


def test_memory_that_running_jobs_hold_is_shown_with_what_is_left(
    ada: User, machine: Machine, make_job: Callable[..., Job]
) -> None:
    need(make_job(), 6 * GIB)
    assert claim_job(worker="w", machine=machine) is not None
    need(make_job(), 3 * GIB)
    assert only(ada).reason == "busy"
    assert "needs 3.00 GiB; running jobs leave at most 2.00 GiB free, on bench" in only(ada).sentence
    make_bench("second")
    assert only(ada).reason == "next"


def test_only_administrators_go_ahead_of_others(make_job: Callable[..., Job]) -> None:
    job = make_job()
    with pytest.raises(InvalidInput, match="priority is 1; allowed: -100 to 0"):
        set_priority(job, 1, actor="test", may_overtake=False)
    job = set_priority(job, 5, actor="test", may_overtake=True)
    assert set_priority(job, 4, actor="test", may_overtake=False).priority == 4


@pytest.mark.parametrize("priority", [-101, 101])
def test_priorities_have_an_end(make_job: Callable[..., Job], priority: int) -> None:
    with pytest.raises(InvalidInput, match="allowed: -100 to 100"):
        set_priority(make_job(), priority, actor="test", may_overtake=True)


def test_a_job_at_work_is_moved_no_more(machine: Machine, make_job: Callable[..., Job]) -> None:
    job = make_job()
    claim_job(worker="w", machine=machine)
    with pytest.raises(JobConflict, match="move"):
        set_priority(job, -1, actor="test", may_overtake=False)
