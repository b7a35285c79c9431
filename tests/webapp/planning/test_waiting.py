"""Jobs submitted before their model was profiled: planned once it is, ended where nothing fits, never claimed before."""

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from tests import llama
from tests.end_to_end.test_survival import PLAN
from tests.webapp.conftest import make_spec, make_tiny_model
from webapp.attempts.claiming import claim_job
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import cancel_job, pause_job, resume_job, retry_job
from webapp.jobs.models import Job, Kind, Reason, State
from webapp.jobs.queue import read_queue
from webapp.planning.submitting import NotPricedYet, submit_job
from webapp.planning.waiting import plan_waiting_jobs

pytestmark = pytest.mark.django_db


@pytest.fixture
def waiting(ada: User, new_llama: Model, dataset: Dataset, machine: Machine) -> Job:
    return submit_job(ada, spec=make_spec(new_llama, dataset), when_ready=True, actor="user:ada")


def claim(machine: Machine) -> Any:
    return claim_job(worker="w", machine=machine, kinds=(Kind.TRAIN,))


def test_a_job_waits_for_its_plan_only_where_that_was_asked_for(
    ada: User, new_llama: Model, dataset: Dataset, machine: Machine
) -> None:
    with pytest.raises(NotPricedYet):
        submit_job(ada, spec=make_spec(new_llama, dataset), actor="user:ada")


def test_a_job_without_a_plan_is_not_claimed_and_says_why(ada: User, waiting: Job, machine: Machine) -> None:
    assert plan_waiting_jobs() == []
    assert claim(machine) is None
    (row,) = read_queue(ada).waiting
    assert (row.reason, row.sentence) == (
        "no_plan", "Waiting for the model's profile; a plan is chosen then, and the job starts by itself.",
    )  # fmt: skip


def test_once_the_model_is_profiled_the_job_is_planned_and_starts(
    waiting: Job, machine: Machine, new_llama: Model, llama_document: dict[str, Any]
) -> None:
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [waiting.pk]
    assert plan_waiting_jobs() == []
    waiting.refresh_from_db()
    assert waiting.plan is not None
    assert 0 < waiting.need_device_bytes <= waiting.prediction["device_peak_high_bytes"]
    assert claim(machine).plan == waiting.plan


def test_a_job_that_fits_nowhere_ends_with_what_would_fit_and_may_be_tried_again(
    ada: User, new_llama: Model, dataset: Dataset, machine: Machine, llama_document: dict[str, Any]
) -> None:
    spec = make_spec(new_llama, dataset, goal={"device_budget_bytes": 64 * 1024})
    job = submit_job(ada, spec=spec, when_ready=True, actor="user:ada")
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert (job.state, job.reason) == (State.FAILED, Reason.DOES_NOT_FIT)
    assert "budget" in job.message
    assert claim(machine) is None
    again = retry_job(job, actor="user:ada")
    assert again.awaits_plan
    assert claim(machine) is None


def test_jobs_that_are_not_ready_keep_no_other_waiting(
    ada: User, waiting: Job, new_llama: Model, dataset: Dataset, llama_document: dict[str, Any]
) -> None:
    other = make_tiny_model(name="another", config={**llama.CONFIG, "num_hidden_layers": 1})
    jobs = [submit_job(ada, spec=make_spec(row, dataset), when_ready=True, actor="user:ada") for row in [other] * 3 + [new_llama]]
    Job.objects.filter(pk=waiting.pk).update(priority=-1)
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [jobs[-1].pk, waiting.pk]


def test_no_more_than_a_few_jobs_are_planned_in_a_round(
    ada: User, waiting: Job, new_llama: Model, dataset: Dataset, llama_document: dict[str, Any]
) -> None:
    later = [submit_job(ada, spec=make_spec(new_llama, dataset), when_ready=True, actor="user:ada") for _ in range(3)]
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [waiting.pk, later[0].pk, later[1].pk]
    assert plan_waiting_jobs() == [later[2].pk]


def test_a_fault_of_the_program_in_one_job_keeps_no_other_waiting(
    waiting: Job, make_job: Callable[..., Job], new_llama: Model, llama_document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    broken = make_job(plan=PLAN, awaits_plan=True)
    Job.objects.filter(pk=broken.pk).update(attempt=1, priority=1, spec={})
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [waiting.pk]
    assert broken.pk in caplog.text
    broken.refresh_from_db()
    assert (broken.state, broken.awaits_plan) == (State.QUEUED, True)


def test_a_job_that_was_cancelled_or_paused_while_it_waited_stays_so(
    waiting: Job, machine: Machine, new_llama: Model, llama_document: dict[str, Any]
) -> None:
    pause_job(waiting, actor="user:ada")
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == [waiting.pk]
    assert claim(machine) is None
    resume_job(Job.objects.get(pk=waiting.pk), actor="user:ada")
    assert claim(machine) is not None


def test_a_cancelled_job_is_not_planned(waiting: Job, new_llama: Model, llama_document: dict[str, Any]) -> None:
    cancel_job(waiting, mode="discard", actor="user:ada")
    keep_profile(new_llama.fingerprint, llama_document)
    assert plan_waiting_jobs() == []


def test_a_job_whose_dataset_is_gone_ends_with_that(
    waiting: Job, dataset: Dataset, new_llama: Model, llama_document: dict[str, Any]
) -> None:
    keep_profile(new_llama.fingerprint, llama_document)
    Dataset.objects.filter(pk=dataset.pk).update(deleted_at=waiting.created_at)
    assert plan_waiting_jobs() == [waiting.pk]
    waiting.refresh_from_db()
    assert (waiting.state, waiting.reason) == (State.FAILED, Reason.NOT_PLANNED)
