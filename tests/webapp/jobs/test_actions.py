"""Moves of a job, one at a time."""

from datetime import timedelta

import pytest
from django.db import DatabaseError, transaction
from django.utils import timezone

from optimizer.serialize import to_json
from tests.webapp.conftest import make_bench, make_spec
from webapp.jobs.actions import (
    cancel_job,
    claim_job,
    create_job,
    enforce_deadlines,
    expire_leases,
    finish_attempt,
    pause_job,
    record_checkpoint,
    record_phase,
    record_progress,
    record_samples,
    record_started,
    renew_lease,
    resend_hints,
    resume_job,
    retry_job,
)
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Artifact, Attempt, Job, Outbox, Sample

DONE = {
    "outcome": "succeeded",
    "reason": "done",
    "message": "",
    "error": None,
    "step": 10,
    "measured": None,
    "summary": {},
    "artifacts": [],
}
DRAINED = {**DONE, "outcome": "drained", "reason": "", "step": 4}


def failed(reason, message="it broke"):
    return {**DONE, "outcome": "failed", "reason": reason, "message": message, "error": {"code": reason}}


def run(machine, **arguments):
    attempt = claim_job(worker="w", machine=machine, **arguments)
    assert attempt is not None
    assert record_started(attempt, pid=1)
    return attempt


def kinds(job):
    return list(job.events.values_list("kind", flat=True))


def reread(job):
    return Job.objects.get(pk=job.pk)


def test_a_new_job_leaves_one_event_and_one_hint_to_send(make_job):
    job = make_job()
    assert (job.state, job.num_steps, kinds(job)) == ("queued", 10, ["created"])
    assert Outbox.objects.filter(job=job).count() == 1


def test_a_claim_gives_a_new_attempt_with_a_fence_and_a_lease(make_job, machine):
    job = make_job()
    attempt = claim_job(worker="w", machine=machine)
    job = reread(job)
    assert (job.state, job.attempt, job.worker, job.fence) == ("starting", 1, "w", attempt.fence)
    assert job.lease_until > timezone.now() + timedelta(seconds=20)
    assert attempt.machine == machine


def test_a_claimed_job_is_not_claimed_twice(make_job, machine):
    make_job()
    assert claim_job(worker="a", machine=machine) is not None
    assert claim_job(worker="b", machine=machine) is None


def test_higher_priority_is_claimed_first_and_then_the_older(make_job, machine):
    first, second, urgent = make_job(), make_job(), make_job()
    Job.objects.filter(pk=urgent.pk).update(priority=1)
    claimed = [claim_job(worker="w", machine=machine).job_id for _ in range(3)]
    assert claimed == [urgent.pk, first.pk, second.pk]


def test_a_job_of_another_kind_of_device_is_not_claimed(make_job):
    make_job()
    assert claim_job(worker="w", machine=make_bench("gpu box", kind="cuda")) is None


def test_a_machine_takes_only_jobs_that_fit_beside_those_it_runs(ada, model, dataset, machine, make_job):
    budget = machine.document["device"]["memory_bytes"]
    small = make_spec(model, dataset, goal={"device_budget_bytes": budget // 4})
    large = make_spec(model, dataset, goal={"device_budget_bytes": budget})
    make_job(spec=small)
    make_job(spec=large)
    third = make_job(spec=small)
    assert claim_job(worker="w", machine=machine) is not None
    assert claim_job(worker="w", machine=machine).job_id == third.pk
    assert claim_job(worker="w", machine=machine) is None


def test_a_draining_machine_claims_nothing(make_job, machine):
    make_job()
    machine.draining = True
    machine.save()
    assert claim_job(worker="w", machine=machine) is None


def test_a_paused_job_is_not_claimed_until_it_is_resumed(make_job, machine):
    job = make_job()
    pause_job(job, actor="user:ada")
    assert claim_job(worker="w", machine=machine) is None
    resume_job(job, actor="user:ada")
    assert claim_job(worker="w", machine=machine) is not None


def test_a_job_is_not_claimed_before_its_time(make_job, machine):
    job = make_job()
    Job.objects.filter(pk=job.pk).update(not_before=timezone.now() + timedelta(hours=1))
    assert claim_job(worker="w", machine=machine) is None


def test_a_queued_job_is_cancelled_at_once(make_job):
    job = make_job()
    assert cancel_job(job, mode="save", actor="user:ada") is True
    job = reread(job)
    assert (job.state, job.reason, job.finished_at is None) == ("cancelled", "cancelled_by_user", False)


def test_a_running_job_learns_of_its_cancellation_with_its_lease(make_job, machine):
    job = make_job()
    attempt = run(machine)
    assert cancel_job(job, mode="save", actor="user:ada") is True
    assert cancel_job(job, mode="save", actor="user:ada") is False
    assert renew_lease(attempt).cancel_mode == "save"
    assert cancel_job(job, mode="discard", actor="user:ada") is True
    assert renew_lease(attempt).cancel_mode == "discard"
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "cancelled"
    assert reread(job).state == "cancelled"


def test_an_ended_job_cannot_be_cancelled(make_job, machine):
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(
        WrongState, match=f"cannot cancel job {job.pk}: it is succeeded; allowed: queued, starting or running"
    ):
        cancel_job(job, mode="save", actor="user:ada")


def test_work_that_was_done_before_a_saving_cancel_counts_as_done(make_job, machine):
    job = make_job()
    attempt = run(machine)
    cancel_job(job, mode="save", actor="user:ada")
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"


def test_a_paused_running_job_goes_back_to_the_queue_and_stays(make_job, machine):
    job = make_job()
    attempt = run(machine)
    pause_job(job, actor="user:ada")
    assert renew_lease(attempt).pause_requested
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "paused"
    assert reread(job).state == "queued"
    assert claim_job(worker="w", machine=machine) is None


def test_a_job_cannot_be_paused_twice(make_job):
    job = make_job()
    pause_job(job, actor="user:ada")
    with pytest.raises(WrongState, match="it is queued, paused"):
        pause_job(job, actor="user:ada")


def test_a_job_that_is_not_paused_cannot_be_resumed(make_job):
    with pytest.raises(WrongState, match="cannot resume"):
        resume_job(make_job(), actor="user:ada")


def test_a_retry_is_a_new_job_of_the_same_spec(make_job, machine):
    job = make_job()
    finish_attempt(run(machine), result=failed("bad_dataset"), exit_code=1)
    again = retry_job(job, actor="user:ada")
    assert (again.state, again.spec, again.retry_of_id) == ("queued", job.spec, job.pk)
    assert reread(job).state == "failed"


def test_a_job_that_succeeded_is_not_retried(make_job, machine):
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(WrongState, match="cannot retry"):
        retry_job(job, actor="user:ada")


def test_the_database_itself_keeps_an_ended_job_ended(make_job, machine):
    job = make_job()
    finish_attempt(run(machine), result=DONE, exit_code=0)
    with pytest.raises(DatabaseError, match="an ended job cannot change its state"), transaction.atomic():
        Job.objects.filter(pk=job.pk).update(state="queued", finished_at=None)


def test_a_worker_whose_lease_ran_out_loses_the_job(make_job, machine):
    job = make_job()
    attempt = run(machine, lease_s=-1)
    assert expire_leases() == [job.pk]
    job = reread(job)
    assert (job.state, job.reason, job.failed_attempts, job.lease_until) == ("queued", "worker_lost", 1, None)
    assert not renew_lease(attempt).held


def test_grace_spares_a_lease_that_has_just_run_out(make_job, machine):
    make_job()
    run(machine, lease_s=-1)
    assert expire_leases(grace_s=60) == []


def test_a_late_renewal_holds_while_nobody_else_has_claimed(make_job, machine):
    make_job()
    attempt = run(machine, lease_s=-1)
    assert renew_lease(attempt).held
    assert expire_leases() == []


def test_a_stale_worker_changes_nothing(make_job, machine, settings):
    settings.HEADROOM_RETRY_BASE_S = 0
    job = make_job()
    stale = run(machine, lease_s=-1)
    expire_leases()
    live = run(machine)
    before = reread(job)
    assert not renew_lease(stale).held
    assert not record_started(stale, pid=2)
    assert not record_phase(stale, "training")
    assert not record_progress(stale, step=9, eta_s=1, summary={"loss": 0})
    assert not record_samples(stale, [{"kind": "step", "step": 9}])
    assert not record_checkpoint(stale, step=9, folder="x", manifest_sha256="0", num_bytes=1)
    assert finish_attempt(stale, result=DONE, exit_code=0) == "stale"
    after = reread(job)
    assert (after.state, after.fence, after.step, after.event_seq) == (
        "running",
        live.fence,
        before.step,
        before.event_seq,
    )
    assert not Sample.objects.exists()


def test_a_drained_attempt_costs_nothing_and_may_start_at_once(make_job, machine):
    job = make_job()
    assert finish_attempt(run(machine), result=DRAINED, exit_code=75) == "drained"
    job = reread(job)
    assert (job.failed_attempts, job.not_before) == (0, None)
    assert claim_job(worker="w", machine=machine) is not None


@pytest.mark.parametrize(("num_failed", "delay_s"), [(0, 10), (1, 20), (2, 40), (3, 80)])
def test_each_lost_attempt_waits_twice_as_long(make_job, machine, num_failed, delay_s):
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(failed_attempts=num_failed)
    assert finish_attempt(attempt, result=None, exit_code=-9) == "worker_lost"
    wait_s = (reread(job).not_before - timezone.now()).total_seconds()
    assert delay_s - 5 < wait_s <= delay_s


def test_the_fifth_failed_attempt_is_the_last(make_job, machine):
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(failed_attempts=4)
    assert finish_attempt(attempt, result=None, exit_code=-9) == "failed"
    job = reread(job)
    assert (job.state, job.reason) == ("failed", "worker_lost")
    assert job.message == "the job's process was ended by signal 9 and left no result; 5 attempts failed; 5 are allowed"


def test_three_quick_deaths_without_a_step_are_a_poisoned_job(make_job, machine, settings):
    settings.HEADROOM_RETRY_BASE_S = 0
    job = make_job()
    answers = [finish_attempt(run(machine), result=None, exit_code=-9) for _ in range(3)]
    assert answers == ["worker_lost", "worker_lost", "failed"]
    assert "3 attempts died within 60 s without a step" in reread(job).message


def test_a_death_after_a_step_is_not_a_quick_one(make_job, machine, settings):
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    for step in (1, 2, 3):
        attempt = run(machine)
        record_progress(attempt, step=step, eta_s=None, summary={})
        answer = finish_attempt(attempt, result=None, exit_code=-9)
    assert answer == "worker_lost"


@pytest.mark.parametrize("reason", ["out_of_device_memory", "bad_dataset", "loss_not_finite", "internal"])
def test_what_the_job_did_to_itself_is_not_retried(make_job, machine, reason):
    job = make_job()
    assert finish_attempt(run(machine), result=failed(reason), exit_code=1) == "failed"
    job = reread(job)
    assert (job.state, job.reason, job.message, job.error) == ("failed", reason, "it broke", {"code": reason})


def test_a_full_disk_is_retried(make_job, machine):
    make_job()
    assert finish_attempt(run(machine), result=failed("disk_full"), exit_code=1) == "disk_full"


def test_an_unknown_reason_is_a_fault_of_the_program(make_job, machine):
    job = make_job()
    finish_attempt(run(machine), result=failed("gremlins"), exit_code=1)
    assert reread(job).reason == "internal"


def test_artifacts_are_kept_only_from_inside_the_jobs_folder(make_job, machine, headroom_home):
    job = make_job()
    folder = headroom_home / "jobs" / job.pk / "artifacts"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (headroom_home / "secret_key").write_text("secret")
    rows = [
        {
            "kind": "model",
            "name": "model.safetensors",
            "file": "artifacts/model.safetensors",
            "num_bytes": 7,
            "sha256": "1" * 64,
        },
        {"kind": "model", "name": "key", "file": "../../secret_key", "num_bytes": 6, "sha256": "2" * 64},
    ]
    finish_attempt(run(machine), result={**DONE, "artifacts": rows}, exit_code=0)
    kept = Artifact.objects.get()
    assert (kept.name, kept.file) == ("model.safetensors", f"jobs/{job.pk}/artifacts/model.safetensors")


def test_a_finished_run_teaches_its_machine(make_job, machine):
    from optimizer.estimate.prediction import Prediction

    prediction = Prediction(
        device_peak_bytes=1000, device_peak_low_bytes=900, device_peak_high_bytes=1100,
        device_bytes_by_category={"weights": 1000},
        host_peak_bytes=0, peak_moment="backward", step_ms=100.0, step_low_ms=80.0, step_high_ms=120.0, lane_busy_ms={},
        exposed_copy_ms=0.0, tokens_per_s=1.0, total_s=1.0, timeline=(), time_source="measured",
    )  # fmt: skip
    make_job(prediction=to_json(prediction))
    measured = {"device_peak_bytes": 1010, "step_ms": 150.0, "host_peak_bytes": 0, "num_steps": 10}
    finish_attempt(run(machine), result={**DONE, "measured": measured}, exit_code=0)
    machine.refresh_from_db()
    assert machine.calibration["num_runs"] == 1
    assert machine.calibration["step_time_factor"] == pytest.approx(1.5, rel=0.05)
    assert Attempt.objects.get().measured == measured


def test_a_sample_that_comes_twice_is_kept_once_and_an_earlier_attempts_keeps_its_number(make_job, machine, settings):
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    finish_attempt(run(machine), result=None, exit_code=-9)
    attempt = run(machine)
    record = {"kind": "step", "attempt": 1, "step": 3, "loss": 2.0}
    assert record_samples(attempt, [record, {**record, "attempt": 2}])
    assert record_samples(attempt, [record])
    assert sorted(Sample.objects.values_list("attempt", "step")) == [(1, 3), (2, 3)]


def test_a_checkpoint_is_recorded_once(make_job, machine):
    job = make_job()
    attempt = run(machine)
    for _ in range(2):
        assert record_checkpoint(attempt, step=5, folder="checkpoints/step-000005-f1", manifest_sha256="0", num_bytes=9)
    assert job.checkpoints.count() == 1
    assert kinds(job).count("checkpointed") == 1


def test_a_phase_is_an_event_once(make_job, machine):
    job = make_job()
    attempt = run(machine)
    assert record_phase(attempt, "training", "12 blocks")
    assert record_phase(attempt, "training", "12 blocks")
    assert kinds(job).count("phase") == 1
    assert job.events.get(kind="phase").message == "training: 12 blocks"


def test_progress_merges_its_numbers_into_the_summary(make_job, machine):
    job = make_job()
    attempt = run(machine)
    record_progress(attempt, step=1, eta_s=5.0, summary={"loss": 3.0})
    record_progress(attempt, step=2, eta_s=4.0, summary={"tokens_per_s": 10})
    job = reread(job)
    assert (job.step, job.eta_s, job.summary) == (2, 4.0, {"loss": 3.0, "tokens_per_s": 10})


def test_a_job_over_its_time_saves_and_fails_as_such(make_job, machine):
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(max_duration_s=60, started_at=timezone.now() - timedelta(seconds=61))
    assert enforce_deadlines() == [job.pk]
    assert renew_lease(attempt).cancel_mode == "save"
    assert finish_attempt(attempt, result=DRAINED, exit_code=75) == "failed"
    job = reread(job)
    assert (job.reason, job.message) == ("max_duration", "the job ran longer than its limit of 60 s")


def test_a_job_without_a_step_for_half_an_hour_is_killed(make_job, machine):
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(progress_at=timezone.now() - timedelta(minutes=31))
    assert enforce_deadlines() == [job.pk]
    assert renew_lease(attempt).cancel_mode == "discard"
    assert finish_attempt(attempt, result=None, exit_code=-9) == "failed"
    assert reread(job).reason == "no_progress"


def test_hints_wait_for_a_broker_and_are_sent_again(make_job, valkey):
    job = make_job()
    assert Outbox.objects.filter(job=job).exists()
    assert resend_hints() == [job.pk]
    assert not Outbox.objects.exists()
    assert resend_hints() == []
    Job.objects.filter(pk=job.pk).update(hinted_at=timezone.now() - timedelta(minutes=5))
    assert resend_hints() == [job.pk]
    assert valkey.client().llen("q:headroom") == 2


def test_a_profiling_job_leaves_its_profile(model, machine, headroom_home):
    from webapp.catalog.models import Profile
    from webapp.jobs.profiles import request_profile

    profile = request_profile(model)
    assert request_profile(model).job_id == profile.job_id
    attempt = run(machine)
    folder = headroom_home / "jobs" / attempt.job_id / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text('{"version": 1}')
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"
    assert Profile.objects.get().document == {"version": 1}


def test_a_profiling_job_that_fails_leaves_its_error(model, machine):
    from webapp.catalog.models import Profile
    from webapp.jobs.profiles import request_profile

    request_profile(model)
    finish_attempt(run(machine), result=failed("bad_model"), exit_code=1)
    assert Profile.objects.get().error == {"code": "bad_model"}


def test_a_job_is_made_with_its_owner_only(ada, model, dataset, machine):
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
