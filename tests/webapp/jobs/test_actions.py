"""People change jobs and workers claim them, one move at a time."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, transaction
from django.utils import timezone

from tests.webapp.attempts.attempts import DONE, DRAINED, failed, kinds, reread, run
from tests.webapp.conftest import make_bench, make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import renew_lease
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import cancel_job, create_job, pause_job, resume_job, retry_job
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Job, Kind


def test_a_new_job_leaves_one_event(make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert (job.state, job.num_steps, kinds(job)) == ("queued", 10, ["created"])


def test_a_claim_gives_a_new_attempt_with_a_fence_and_a_lease(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = claim_job(worker="w", machine=machine)
    job = reread(job)
    assert (job.state, job.attempt, job.worker, job.fence) == ("starting", 1, "w", attempt.fence)
    assert job.lease_until > timezone.now() + timedelta(seconds=20)
    assert attempt.machine == machine


def test_a_claimed_job_is_not_claimed_twice(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    assert claim_job(worker="a", machine=machine) is not None
    assert claim_job(worker="b", machine=machine) is None


def test_higher_priority_is_claimed_first_and_then_the_older(make_job: Callable[..., Job], machine: Machine) -> None:
    first, second, urgent = make_job(), make_job(), make_job()
    Job.objects.filter(pk=urgent.pk).update(priority=1)
    claimed = [claim_job(worker="w", machine=machine).job_id for _ in range(3)]
    assert claimed == [urgent.pk, first.pk, second.pk]


def test_a_job_of_another_kind_of_device_is_not_claimed(make_job: Callable[..., Job]) -> None:
    make_job()
    assert claim_job(worker="w", machine=make_bench("gpu box", kind="cuda")) is None


def test_a_slot_claims_only_the_kinds_that_it_takes(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    assert claim_job(worker="w", machine=machine, kinds=[Kind.PROFILE]) is None
    assert claim_job(worker="w", machine=machine, kinds=[Kind.TRAIN]) is not None


def test_a_machine_takes_only_jobs_that_fit_beside_those_it_runs(
    ada: User, model: Model, dataset: Dataset, machine: Machine, make_job: Callable[..., Job]
) -> None:
    budget = machine.document["device"]["memory_bytes"]
    small = make_spec(model, dataset, goal={"device_budget_bytes": budget // 4})
    large = make_spec(model, dataset, goal={"device_budget_bytes": budget})
    make_job(spec=small)
    make_job(spec=large)
    third = make_job(spec=small)
    assert claim_job(worker="w", machine=machine) is not None
    assert claim_job(worker="w", machine=machine).job_id == third.pk
    assert claim_job(worker="w", machine=machine) is None


def test_a_draining_machine_claims_nothing(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    machine.draining = True
    machine.save()
    assert claim_job(worker="w", machine=machine) is None


def test_a_paused_job_is_not_claimed_until_it_is_resumed(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    pause_job(job, actor="user:ada")
    assert claim_job(worker="w", machine=machine) is None
    resume_job(job, actor="user:ada")
    assert claim_job(worker="w", machine=machine) is not None


def test_a_job_is_not_claimed_before_its_time(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    Job.objects.filter(pk=job.pk).update(not_before=timezone.now() + timedelta(hours=1))
    assert claim_job(worker="w", machine=machine) is None


def test_a_queued_job_is_cancelled_at_once(make_job: Callable[..., Job]) -> None:
    job = make_job()
    assert cancel_job(job, mode="save", actor="user:ada") is True
    job = reread(job)
    assert (job.state, job.reason, job.finished_at is None) == ("cancelled", "cancelled_by_user", False)


def test_a_running_job_learns_of_its_cancellation_with_its_lease(
    make_job: Callable[..., Job], machine: Machine
) -> None:
    job = make_job()
    attempt = run(machine)
    assert cancel_job(job, mode="save", actor="user:ada") is True
    assert cancel_job(job, mode="save", actor="user:ada") is False
    assert renew_lease(attempt).cancel_mode == "save"
    assert cancel_job(job, mode="discard", actor="user:ada") is True
    assert renew_lease(attempt).cancel_mode == "discard"
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    assert reread(job).state == "cancelled"


def test_an_ended_job_cannot_be_cancelled(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(
        WrongState, match=f"cannot cancel job {job.pk}: it is succeeded; allowed: queued, starting or running"
    ):
        cancel_job(job, mode="save", actor="user:ada")


def test_work_that_was_done_before_a_saving_cancel_counts_as_done(
    make_job: Callable[..., Job], machine: Machine
) -> None:
    job = make_job()
    attempt = run(machine)
    cancel_job(job, mode="save", actor="user:ada")
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"


def test_a_paused_running_job_goes_back_to_the_queue_and_stays(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    pause_job(job, actor="user:ada")
    assert renew_lease(attempt).pause_requested
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "paused"
    assert reread(job).state == "queued"
    assert claim_job(worker="w", machine=machine) is None


def test_a_job_cannot_be_paused_twice(make_job: Callable[..., Job]) -> None:
    job = make_job()
    pause_job(job, actor="user:ada")
    with pytest.raises(WrongState, match="it is queued, paused"):
        pause_job(job, actor="user:ada")


def test_a_job_that_is_not_paused_cannot_be_resumed(make_job: Callable[..., Job]) -> None:
    with pytest.raises(WrongState, match="cannot resume"):
        resume_job(make_job(), actor="user:ada")


def test_a_retry_is_a_new_job_of_the_same_spec(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    finish_attempt(run(machine), result=failed("bad_dataset"), exit_code=1)
    again = retry_job(job, actor="user:ada")
    assert (again.state, again.spec, again.retry_of_id) == ("queued", job.spec, job.pk)
    assert reread(job).state == "failed"


def test_a_job_that_succeeded_is_not_retried(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(WrongState, match="cannot retry"):
        retry_job(job, actor="user:ada")


def test_the_database_itself_keeps_an_ended_job_ended(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(DatabaseError, match="an ended job cannot change its state"), transaction.atomic():
        Job.objects.filter(pk=job.pk).update(state="queued", finished_at=None)


def test_a_job_is_made_with_its_owner_only(ada: User, model: Model, dataset: Dataset, machine: Machine) -> None:
    job = create_job(
        owner=ada,
        spec=make_spec(model, dataset),
        model=model,
        dataset=dataset,
        plan=None,
        prediction=None,
        machine=machine,
        actor="user:ada",
    )
    assert job.owner == ada
