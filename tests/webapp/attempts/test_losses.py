"""A lost worker, and whose doing it is."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.utils import timezone
from pytest_django import Settings

from tests.webapp.attempts.attempts import DONE, DRAINED, kinds, reread
from tests.webapp.conftest import make_bench
from webapp.attempts.claiming import claim_job
from webapp.attempts.losses import Losses, count_losses
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import expire_leases
from webapp.attempts.records import record_progress, record_started
from webapp.catalog.models import Machine, Model, Profile
from webapp.jobs.actions import resume_job
from webapp.jobs.models import Attempt, Job
from webapp.planning.search.profile_requests import request_profile
from webapp.planning.search.profiles import ProfileNeed


@pytest.fixture(autouse=True)
def _at_once(settings: Settings) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0


@pytest.fixture
def boots() -> Callable[[], str]:
    """Names of workers; each start of a machine's worker has a new one."""
    numbers = iter(range(1000))
    return lambda: f"box:{next(numbers)}"


def begin(job: Job, machine: Machine, worker: str, *, step: int | None = 0) -> Attempt:
    attempt = claim_job(worker=worker, machine=machine, job_id=job.pk, lease_s=-1)
    assert attempt is not None
    if step is not None:
        assert record_started(attempt, pid=1, resumed_from_step=step)
    return attempt


def lose(job: Job, machine: Machine, worker: str, *, step: int | None = 0) -> str:
    begin(job, machine, worker, step=step)
    assert expire_leases() == [job.pk]
    return reread(job).state


def end_well(job: Job, machine: Machine, worker: str, *, lived_s: float = 3600) -> None:
    attempt = begin(job, machine, worker)
    finish_attempt(attempt, result=DRAINED, exit_code=75)
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=timezone.now() + timedelta(seconds=lived_s))


def test_a_machine_that_starts_again_and_again_fails_nothing(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    jobs = [make_job() for _ in range(3)]
    for _ in range(12):
        for job in jobs:
            assert lose(job, machine, boots()) == "queued"
    for job in jobs:
        row = reread(job)
        assert (row.state, row.failed_attempts, row.pause_requested_at) == ("queued", 0, None)
        assert row.reason == "worker_lost"


def test_a_job_that_ends_each_worker_while_others_end_well_there_fails(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    culprit, other = make_job(), make_job()
    states = []
    for _ in range(3):
        states.append(lose(culprit, machine, boots()))
        end_well(other, machine, boots())
    assert states == ["queued", "queued", "failed"]
    row = reread(culprit)
    assert (row.reason, row.failed_attempts) == ("worker_lost", 0)
    assert row.message == (
        "the worker was lost 3 times in a row without a new checkpoint, while other jobs ended well on the same machine"
    )


def test_short_jobs_between_two_losses_do_not_blame_a_long_one(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    job, other = make_job(), make_job()
    for _ in range(5):
        attempt = begin(job, machine, boots())
        Attempt.objects.filter(pk=attempt.pk).update(started_at=timezone.now() - timedelta(hours=1))
        expire_leases()
        end_well(other, machine, boots(), lived_s=60)
    assert reread(job).state == "queued"


def test_others_that_were_lost_with_the_same_worker_say_nothing(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    culprit, victim = make_job(), make_job()
    for _ in range(2):
        worker = boots()
        attempt, _ = begin(culprit, machine, worker), begin(victim, machine, worker)
        expire_leases()
    assert count_losses(attempt, now=timezone.now()) == Losses(num_in_a_row=2)


def test_other_machines_say_nothing(make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]) -> None:
    job, other = make_job(), make_job()
    attempt = begin(job, machine, boots())
    end_well(other, make_bench("elsewhere"), boots())
    assert count_losses(attempt, now=timezone.now()) == Losses(num_in_a_row=1)


def test_a_job_of_which_nothing_says_whose_doing_it_is_is_held_and_may_be_resumed(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    job = make_job()
    for _ in range(10):
        assert reread(job).pause_requested_at is None
        assert lose(job, machine, boots()) == "queued"
    row = reread(job)
    assert row.pause_requested_at is not None
    assert row.message == (
        "the worker was lost, for the 10th time in a row without a new checkpoint; the job is paused until somebody resumes it"
    )
    assert kinds(job)[-1] == "paused"
    resume_job(row, actor="user:ada")
    assert lose(job, machine, boots()) == "queued"
    assert reread(job).pause_requested_at is None


def test_a_profile_job_fails_instead_of_being_held_and_is_asked_for_again(
    model: Model, machine: Machine, boots: Callable[[], str]
) -> None:
    profile = request_profile(ProfileNeed(model=model))
    job = Job.objects.get(pk=profile.job_id)
    states = [lose(job, machine, boots()) for _ in range(10)]
    assert states == ["queued"] * 9 + ["failed"]
    row = reread(job)
    assert row.message == "the worker was lost, for the 10th time in a row without a new checkpoint"
    profile.refresh_from_db()
    assert profile.error is not None
    assert profile.error["code"] == "worker_lost"
    Profile.objects.update(updated_at=timezone.now() - timedelta(minutes=2))
    again = request_profile(ProfileNeed(model=model))
    assert again.job_id != row.pk
    assert again.error is None


def test_a_new_checkpoint_begins_a_new_row_and_a_loss_before_the_start_is_of_the_same(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    job = make_job()
    for step in (0, 0, None, 50, None):
        lose(job, machine, boots(), step=step)
    assert count_losses(begin(job, machine, boots(), step=50), now=timezone.now()).num_in_a_row == 4


def test_a_lost_worker_is_no_quick_death_of_the_jobs_process(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    job = make_job()
    lose(job, machine, boots())
    lose(job, machine, boots())
    assert finish_attempt(begin(job, machine, boots()), result=None, exit_code=-9) == "worker_lost"
    assert reread(job).failed_attempts == 1


def test_a_first_loss_goes_on_at_once(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str], settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 10
    job = make_job()
    lose(job, machine, boots())
    assert reread(job).not_before is None
    assert begin(job, machine, boots()).number == 2


@pytest.mark.parametrize(("num_before", "delay_s"), [(1, 10), (2, 20), (7, 360)])
def test_each_further_loss_in_a_row_waits_twice_as_long(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str], settings: Settings, num_before: int, delay_s: int
) -> None:
    job = make_job()
    for _ in range(num_before):
        lose(job, machine, boots())
    settings.HEADROOM_RETRY_BASE_S = 10
    lose(job, machine, boots())
    wait_s = (reread(job).not_before - timezone.now()).total_seconds()
    assert delay_s - 5 < wait_s <= delay_s


def test_progress_of_a_job_does_not_hide_that_it_dies_at_the_same_step(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    job, other = make_job(), make_job()
    for _ in range(3):
        attempt = begin(job, machine, boots(), step=50)
        record_progress(attempt, step=99, eta_s=None, summary={})
        expire_leases()
        end_well(other, machine, boots())
    assert reread(job).state == "failed"


def test_a_job_that_ended_stays_ended(make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]) -> None:
    job = make_job()
    assert finish_attempt(begin(job, machine, boots()), result=DONE, exit_code=0) == "succeeded"
    assert expire_leases() == []


@pytest.mark.django_db(transaction=True)
def test_a_job_whose_row_is_locked_keeps_no_other_from_being_given_back(
    make_job: Callable[..., Job], machine: Machine, boots: Callable[[], str]
) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite locks no rows")
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        begin(job, machine, boots())
    locked = jobs[0]
    is_locked, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        """Hold the row's lock, like a worker that was halted within a write."""
        with transaction.atomic():
            Job.objects.select_for_update().get(pk=locked.pk)
            is_locked.set()
            may_go.wait(30)
        connection.close()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert is_locked.wait(10)
        assert sorted(expire_leases()) == sorted(job.pk for job in jobs[1:])
        with pytest.raises(OperationalError):  # none was to be had, and perhaps no live worker renews its lease either
            expire_leases()
    finally:
        may_go.set()
        holder.join()
    assert expire_leases() == [locked.pk]
