"""Measurements for charts: of each step the latest attempt's, thinned without losing a peak."""

from collections.abc import Callable
from typing import Any

import pytest

from webapp.jobs.metrics import job_metrics
from webapp.jobs.models import Job, Sample

pytestmark = pytest.mark.django_db


def keep(job: Job, kind: str, step: int, *, attempt: int = 1, **fields: Any) -> Sample:
    return Sample.of_record({"kind": kind, "step": step, "attempt": attempt, **fields}, job_id=job.pk, attempt=attempt)


@pytest.fixture
def measured(make_job: Callable[..., Job]) -> Job:
    """A run of 1,000 steps with one high peak and one high loss, and a second attempt from step 900 on."""
    job = make_job()
    samples = [
        keep(job, "step", step, device_peak_bytes=900 if step == 401 else 100 + step % 7, loss=9.0 if step == 777 else 2.0)
        for step in range(1, 1001)
    ]
    samples += [keep(job, "step", step, attempt=2, device_peak_bytes=50, loss=1.0) for step in range(900, 1001)]
    samples += [keep(job, "eval", 500, validation_loss=2.5), keep(job, "timeline", 10, points=[[0.0, {}]])]
    Sample.objects.bulk_create(samples)
    return job


def test_a_short_run_is_returned_whole_with_later_attempts_in_place_of_earlier_ones(measured: Job) -> None:
    steps = job_metrics(measured.pk)["steps"]
    assert [record["step"] for record in steps] == list(range(1, 1001))
    assert {record["attempt"] for record in steps[899:]} == {2}


@pytest.mark.parametrize("max_points", [3, 10, 101, 999])
def test_a_long_run_is_thinned_and_keeps_its_peak_its_worst_loss_and_its_end(measured: Job, max_points: int) -> None:
    steps = job_metrics(measured.pk, max_points=max_points)["steps"]
    found = [record["step"] for record in steps]
    assert len(found) <= max_points
    assert found == sorted(found)
    assert found[-1] == 1000
    assert {401, 777} <= set(found)


def test_evaluations_and_the_latest_timeline_come_whole(measured: Job) -> None:
    metrics = job_metrics(measured.pk, max_points=10)
    assert metrics["evals"] == [{"kind": "eval", "step": 500, "attempt": 1, "validation_loss": 2.5}]
    assert metrics["timeline"]["step"] == 10


def test_steps_without_a_loss_are_kept_too(make_job: Callable[..., Job]) -> None:
    job = make_job()
    Sample.objects.bulk_create([keep(job, "step", step, loss=None) for step in range(1, 41)])
    assert job_metrics(job.pk, max_points=5)["steps"][-1] == {"kind": "step", "step": 40, "attempt": 1, "loss": None}


def test_of_a_long_run_highest_and_lowest_values_are_kept_wherever_they_are(make_job: Callable[..., Job]) -> None:
    job = make_job()
    odd: dict[str, dict[int, float]] = {
        "loss": {333: 9.0, 601: 0.1},
        "tokens_per_s": {150: 5.0, 905: 900.0},
        "device_peak_bytes": {444: 10, 777: 999},
    }
    usual = {"loss": 2.0, "tokens_per_s": 100.0, "device_peak_bytes": 500}
    values = [{name: odd[name].get(step, value) for name, value in usual.items()} for step in range(1, 1001)]
    Sample.objects.bulk_create([keep(job, "step", step, **fields) for step, fields in enumerate(values, start=1)])
    found = {record["step"] for record in job_metrics(job.pk, max_points=100)["steps"]}
    assert len(found) <= 100
    assert {step for steps in odd.values() for step in steps} <= found


def test_only_the_fields_asked_for_are_returned(make_job: Callable[..., Job]) -> None:
    job = make_job()
    Sample.objects.bulk_create([keep(job, "step", 1, loss=2.0, tokens_per_s=5.0, time_s=1.0)])
    (record,) = job_metrics(job.pk, fields=["loss"])["steps"]
    assert record == {"kind": "step", "attempt": 1, "step": 1, "time_s": 1.0, "loss": 2.0}
