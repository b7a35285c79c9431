"""Reports of a worker while an attempt runs, and the answer to a worker that reports nothing."""

from collections.abc import Callable
from datetime import timedelta

from django.utils import timezone
from pytest_django import Settings

from tests.valkey import Valkey
from tests.webapp.attempts.attempts import DRAINED, kinds, reread, run
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import enforce_deadlines, resend_hints
from webapp.attempts.records import record_checkpoint, record_phase, record_progress, record_samples, renew_lease
from webapp.catalog.models import Machine
from webapp.jobs.models import Job, Sample


def test_a_sample_that_comes_twice_is_kept_once_and_an_earlier_attempts_keeps_its_number(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    finish_attempt(run(machine), result=None, exit_code=-9)
    attempt = run(machine)
    record = {"kind": "step", "attempt": 1, "step": 3, "loss": 2.0}
    assert record_samples(attempt, [record, {**record, "attempt": 2}])
    assert record_samples(attempt, [record])
    assert sorted(Sample.objects.values_list("attempt", "step")) == [(1, 3), (2, 3)]


def test_a_checkpoint_is_recorded_once(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    for _ in range(2):
        assert record_checkpoint(attempt, step=5, folder="checkpoints/step-000005-f1", manifest_sha256="0", num_bytes=9)
    assert job.checkpoints.count() == 1
    assert kinds(job).count("checkpointed") == 1


def test_a_phase_is_an_event_once(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    assert record_phase(attempt, "training", "12 blocks")
    assert record_phase(attempt, "training", "12 blocks")
    assert kinds(job).count("phase") == 1
    assert job.events.get(kind="phase").message == "training: 12 blocks"


def test_progress_merges_its_numbers_into_the_summary(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    record_progress(attempt, step=1, eta_s=5.0, summary={"loss": 3.0})
    record_progress(attempt, step=2, eta_s=4.0, summary={"tokens_per_s": 10})
    job = reread(job)
    assert (job.step, job.eta_s, job.summary) == (2, 4.0, {"loss": 3.0, "tokens_per_s": 10})


def test_a_job_over_its_time_saves_and_fails_as_such(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(max_duration_s=60, started_at=timezone.now() - timedelta(seconds=61))
    assert enforce_deadlines() == [job.pk]
    assert renew_lease(attempt).cancel_mode == "save"
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "failed"
    job = reread(job)
    assert (job.reason, job.message) == ("max_duration", "the job ran longer than its limit of 60 s")


def test_a_job_without_a_step_for_half_an_hour_is_killed(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(progress_at=timezone.now() - timedelta(minutes=31))
    assert enforce_deadlines() == [job.pk]
    assert renew_lease(attempt).cancel_mode == "discard"
    assert finish_attempt(attempt, result=None, exit_code=-9) == "failed"
    assert reread(job).reason == "no_progress"


def test_a_job_whose_worker_was_lost_long_ago_is_no_hanging_one(make_job: Callable[..., Job], machine: Machine) -> None:
    """As in a restored backup: it is given back, and does not end."""
    job = make_job()
    run(machine)
    long_ago = timezone.now() - timedelta(days=3)
    Job.objects.filter(pk=job.pk).update(
        progress_at=long_ago, started_at=long_ago, max_duration_s=3600, lease_until=long_ago
    )
    assert enforce_deadlines() == []
    assert reread(job).cancel_requested_at is None


def test_hints_wait_for_a_broker_and_are_sent_again(make_job: Callable[..., Job], valkey: Valkey) -> None:
    job = make_job()
    assert resend_hints() == []
    Job.objects.filter(pk=job.pk).update(hinted_at=None)
    assert resend_hints() == [job.pk]
    assert resend_hints() == []
    Job.objects.filter(pk=job.pk).update(hinted_at=timezone.now() - timedelta(minutes=5))
    assert resend_hints() == [job.pk]
    assert valkey.client().llen("q:headroom") == 2
