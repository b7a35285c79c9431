"""Next steps that help after a failure."""

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tests.webapp.pages import rows
from webapp.jobs.models import Job, Reason
from webapp.pages.forms.training import JobForm
from webapp.pages.shown.next_steps import NAMES, NextStep, next_steps

pytestmark = pytest.mark.django_db
MIB = 1024**2


def steps_of(ada: User, reason: Reason, *, fields: Any = None, has_checkpoint: bool = False) -> tuple[NextStep, ...]:
    job = Job(pk="job_x", owner=ada, spec={"workload": {"learning_rate": 0.001}}, reason=reason, error={"fields": fields or {}})
    return next_steps(job, has_checkpoint=has_checkpoint)


@pytest.mark.parametrize("reason", sorted(set(Reason) - {Reason.DONE, Reason.CANCELLED_BY_USER}))
def test_each_failure_has_a_name_and_something_to_do(ada: User, reason: Reason) -> None:
    assert NAMES[reason]
    assert steps_of(ada, reason)


def test_where_memory_ran_out_the_budget_that_would_have_done_is_offered(ada: User) -> None:
    fields = {"in_use_bytes": 400 * MIB, "requested_bytes": 100 * MIB}
    labels = {step.label: step.url for step in steps_of(ada, Reason.OUT_OF_DEVICE_MEMORY, fields=fields)}
    assert labels["Raise the device budget to 525 MiB"] == "/jobs/new/?from=job_x&device_budget=525+MiB"


def test_no_budget_below_the_peak_that_was_predicted_is_offered(ada: User) -> None:
    """The bytes in memory when it ran out are fewer than the peak that the rest of the step would have come to."""
    fields = {"in_use_bytes": 380 * MIB, "requested_bytes": 20 * MIB}
    job = Job(pk="job_x", owner=ada, spec={}, reason=Reason.OUT_OF_DEVICE_MEMORY, error={"fields": fields})
    job.prediction = {"device_peak_bytes": 677 * MIB, "host_peak_bytes": 90 * MIB}
    labels = [step.label for step in next_steps(job, has_checkpoint=False)]
    assert "Raise the device budget to 711 MiB" in labels
    job.reason = Reason.OUT_OF_HOST_MEMORY
    assert "Raise the host budget to 420 MiB" in [step.label for step in next_steps(job, has_checkpoint=False)]


def test_a_diverged_run_is_offered_a_tenth_of_its_learning_rate(ada: User) -> None:
    first = steps_of(ada, Reason.LOSS_NOT_FINITE)[0]
    assert (first.label, first.url) == (
        "Run again with a learning rate of 0.0001",
        "/jobs/new/?from=job_x&learning_rate=0.0001",
    )


def test_a_retry_says_whether_it_goes_on_from_a_checkpoint(ada: User) -> None:
    first = steps_of(ada, Reason.WORKER_LOST, has_checkpoint=True)[0]
    assert (first.label, first.is_post) == ("Retry unchanged from the checkpoint", True)


def test_a_link_fills_the_form_but_for_what_it_changes(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    form: JobForm = browser.get("/jobs/new/", {"from": job.pk, "device_budget": "525 MiB"}).context["form"]
    assert form["device_budget"].value() == "525 MiB"
    assert form["num_steps"].value() == rows.NUM_STEPS
