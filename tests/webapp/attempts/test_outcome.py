"""Ends of attempts, and what becomes of their jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django import Settings

from optimizer.base.serialize import to_json
from tests.webapp.attempts.attempts import DONE, DRAINED, failed, reread, run
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import MAX_STORE_LOSSES, finish_attempt
from webapp.attempts.reconciling import expire_leases
from webapp.attempts.records import (
    record_checkpoint,
    record_phase,
    record_progress,
    record_samples,
    record_started,
    renew_lease,
)
from webapp.catalog.models import Machine, Model
from webapp.jobs.models import Artifact, Attempt, Job, Sample


def test_a_worker_whose_lease_ran_out_loses_the_job(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine, lease_s=-1)
    assert expire_leases() == [job.pk]
    job = reread(job)
    assert (job.state, job.reason, job.failed_attempts, job.lease_until) == ("queued", "worker_lost", 0, None)
    assert not renew_lease(attempt).held


def test_grace_spares_a_lease_that_has_just_run_out(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    run(machine, lease_s=-1)
    assert expire_leases(grace_s=60) == []


def test_a_late_renewal_holds_while_nobody_else_has_claimed(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    attempt = run(machine, lease_s=-1)
    assert renew_lease(attempt).held
    assert expire_leases() == []


def test_a_stale_worker_changes_nothing(make_job: Callable[..., Job], machine: Machine, settings: Settings) -> None:
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


def test_a_drained_attempt_costs_nothing_and_may_start_at_once(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    assert finish_attempt(run(machine), result=DRAINED, exit_code=75) == "drained"
    job = reread(job)
    assert (job.failed_attempts, job.not_before) == (0, None)
    assert claim_job(worker="w", machine=machine) is not None


@pytest.mark.parametrize(("num_failed", "delay_s"), [(0, 10), (1, 20), (2, 40), (3, 80)])
def test_each_lost_attempt_waits_twice_as_long(
    make_job: Callable[..., Job], machine: Machine, num_failed: int, delay_s: int
) -> None:
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(failed_attempts=num_failed)
    assert finish_attempt(attempt, result=None, exit_code=-9) == "worker_lost"
    wait_s = (reread(job).not_before - timezone.now()).total_seconds()
    assert delay_s - 5 < wait_s <= delay_s


@pytest.mark.parametrize(("num_failed", "waits"), [(0, False), (1, True)])
def test_the_first_lost_attempt_that_had_done_steps_is_followed_at_once(
    make_job: Callable[..., Job], machine: Machine, num_failed: int, *, waits: bool
) -> None:
    job = make_job()
    Job.objects.filter(pk=job.pk).update(failed_attempts=num_failed)
    attempt = run(machine)
    record_progress(attempt, step=1, eta_s=None, summary={})
    assert finish_attempt(attempt, result=None, exit_code=-9) == "worker_lost"
    assert (reread(job).not_before is not None) == waits


def test_the_fifth_failed_attempt_is_the_last(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = run(machine)
    Job.objects.filter(pk=job.pk).update(failed_attempts=4)
    assert finish_attempt(attempt, result=None, exit_code=-9) == "failed"
    job = reread(job)
    assert (job.state, job.reason) == ("failed", "worker_lost")
    assert job.message == "the job's process was ended by signal 9 and left no result; 5 attempts failed; 5 are allowed"


def test_three_quick_deaths_without_a_step_are_a_poisoned_job(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    job = make_job()
    answers = [finish_attempt(run(machine), result=None, exit_code=-9) for _ in range(3)]
    assert answers == ["worker_lost", "worker_lost", "failed"]
    assert "3 attempts died within 60 s without a step" in reread(job).message


def test_a_death_after_a_step_is_not_a_quick_one(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    for step in (1, 2, 3):
        attempt = run(machine)
        record_progress(attempt, step=step, eta_s=None, summary={})
        answer = finish_attempt(attempt, result=None, exit_code=-9)
    assert answer == "worker_lost"


@pytest.mark.parametrize("reason", ["out_of_device_memory", "bad_dataset", "loss_not_finite", "internal"])
def test_what_the_job_did_to_itself_is_not_retried(make_job: Callable[..., Job], machine: Machine, reason: str) -> None:
    job = make_job()
    assert finish_attempt(run(machine), result=failed(reason), exit_code=1) == "failed"
    job = reread(job)
    assert (job.state, job.reason, job.message, job.error) == ("failed", reason, "it broke", {"code": reason})


def test_a_full_disk_is_retried(make_job: Callable[..., Job], machine: Machine) -> None:
    make_job()
    assert finish_attempt(run(machine), result=failed("disk_full"), exit_code=1) == "disk_full"


def test_a_disk_that_stays_full_ends_no_job_and_is_tried_ever_more_seldom(
    make_job: Callable[..., Job], machine: Machine
) -> None:
    job, waits = make_job(), []
    for _ in range(8):
        assert finish_attempt(run(machine), result=failed("disk_full"), exit_code=1) == "disk_full"
        job = reread(job)
        waits.append(round((job.not_before - timezone.now()).total_seconds() + 0.5))
        Job.objects.update(not_before=None)
    assert (job.state, job.reason, job.failed_attempts) == ("queued", "disk_full", 0)
    assert waits == [10, 20, 40, 80, 160, 320, 360, 360]


@pytest.mark.parametrize("reason", ["machine_fault", "remote_store_lost"])
def test_a_fault_of_the_machine_or_the_store_is_tried_ever_more_seldom_and_counts_against_no_job(
    make_job: Callable[..., Job], machine: Machine, reason: str
) -> None:
    job, waits = make_job(), []
    for _ in range(8):
        assert finish_attempt(run(machine), result=failed(reason), exit_code=1) == reason
        job = reread(job)
        waits.append(round((job.not_before - timezone.now()).total_seconds() + 0.5))
        Job.objects.update(not_before=None)
    assert (job.state, job.reason, job.message, job.failed_attempts) == ("queued", reason, "it broke", 0)
    assert waits == [10, 20, 40, 80, 160, 320, 360, 360]


def test_a_machine_that_never_works_again_fails_no_job(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    for _ in range(2 * MAX_STORE_LOSSES):
        assert finish_attempt(run(machine), result=failed("machine_fault"), exit_code=1) == "machine_fault"


def test_a_store_that_is_gone_for_good_fails_the_job_in_words(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    job = make_job()
    answers = [finish_attempt(run(machine), result=failed("remote_store_lost"), exit_code=1) for _ in range(MAX_STORE_LOSSES)]
    assert answers == ["remote_store_lost"] * (MAX_STORE_LOSSES - 1) + ["failed"]
    job = reread(job)
    assert (job.state, job.reason) == ("failed", "remote_store_lost")
    assert job.message == "it broke; 10 attempts in a row met this without a new checkpoint"


def test_a_new_checkpoint_begins_the_count_of_lost_stores_anew(
    make_job: Callable[..., Job], machine: Machine, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    make_job()
    for number in range(2 * MAX_STORE_LOSSES):
        attempt = claim_job(worker="w", machine=machine)
        record_started(attempt, pid=1, resumed_from_step=100 * (number // (MAX_STORE_LOSSES - 1)))
        assert finish_attempt(attempt, result=failed("remote_store_lost"), exit_code=1) == "remote_store_lost"


def test_an_unknown_reason_is_a_fault_of_the_program(make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    finish_attempt(run(machine), result=failed("gremlins"), exit_code=1)
    assert reread(job).reason == "internal"


def test_artifacts_are_kept_only_from_inside_the_jobs_folder(
    make_job: Callable[..., Job], machine: Machine, headroom_home: Path
) -> None:
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


@pytest.mark.django_db(transaction=True)
def test_the_event_file_of_the_last_attempt_takes_the_place_of_the_earlier_one(
    make_job: Callable[..., Job], machine: Machine, headroom_home: Path, settings: Settings
) -> None:
    settings.HEADROOM_RETRY_BASE_S = 0
    job = make_job()
    folder = headroom_home / "jobs" / job.pk / "artifacts" / "tensorboard"
    folder.mkdir(parents=True)
    for number, result in ((1, failed("disk_full")), (2, DONE)):
        (folder / f"events.{number}").write_bytes(b"events")
        place = f"tensorboard/events.{number}"
        row = {"kind": "tensorboard", "name": place, "file": f"artifacts/{place}", "num_bytes": 6, "sha256": "1" * 64}
        finish_attempt(run(machine), result={**result, "artifacts": [row]}, exit_code=int(result is not DONE))
        assert [artifact.name for artifact in Artifact.objects.all()] == [place]
        assert [file.name for file in folder.iterdir()] == [f"events.{number}"]


def test_a_finished_run_teaches_its_machine(make_job: Callable[..., Job], machine: Machine) -> None:
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


def test_a_profiling_job_leaves_its_profile(model: Model, machine: Machine, headroom_home: Path) -> None:
    from webapp.catalog.models import Profile
    from webapp.planning.search.profile_requests import request_profile
    from webapp.planning.search.profiles import ProfileNeed

    profile = request_profile(ProfileNeed(model=model))
    assert request_profile(ProfileNeed(model=model)).job_id == profile.job_id
    attempt = run(machine)
    folder = headroom_home / "jobs" / attempt.job_id / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text('{"version": 1}')
    assert finish_attempt(attempt, result=DONE, exit_code=0) == "succeeded"
    assert Profile.objects.get().document == {"version": 1}


def test_a_profiling_job_that_fails_leaves_its_error(model: Model, machine: Machine) -> None:
    from webapp.catalog.models import Profile
    from webapp.planning.search.profile_requests import request_profile
    from webapp.planning.search.profiles import ProfileNeed

    request_profile(ProfileNeed(model=model))
    finish_attempt(run(machine), result=failed("bad_model"), exit_code=1)
    assert Profile.objects.get().error == {"code": "bad_model"}
