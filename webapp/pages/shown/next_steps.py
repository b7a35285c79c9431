"""Suggests what to do about a job that has ended: its failure by name, and the steps that help, the most likely first.

Pure, from the job's row. A step is a form to fill (a link) or an action done at once (a POST).
"""

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from optimizer.base.units import MIB
from webapp.jobs.models import Job, Kind, Reason
from webapp.pages.forms.work import exact_bytes

NAMES: dict[str, str] = {
    Reason.DONE: "Finished",
    Reason.CANCELLED_BY_USER: "Stopped on request",
    Reason.OUT_OF_DEVICE_MEMORY: "Device memory ran out",
    Reason.OUT_OF_HOST_MEMORY: "Host memory ran out",
    Reason.DISK_FULL: "The disk is full",
    Reason.LOSS_NOT_FINITE: "The loss became infinite or not a number",
    Reason.BAD_DATASET: "The dataset cannot be used",
    Reason.BAD_MODEL: "The model cannot be used",
    Reason.WORKER_LOST: "The worker was lost too often",
    Reason.MACHINE_FAULT: "The machine failed",
    Reason.NO_PROGRESS: "No new step was seen for too long",
    Reason.MAX_DURATION: "The job ran longer than it may",
    Reason.PLAN_STALE: "The plan no longer holds on this machine",
    Reason.MISSING_EXTRA: "The plan needs a package that this machine lacks",
    Reason.REMOTE_STORE_FULL: "The store of the remote tier took no more",
    Reason.REMOTE_STORE_LOST: "The store of the remote tier did not answer",
    Reason.INTERNAL: "Headroom itself failed",
    Reason.DOES_NOT_FIT: "It does not fit",
    Reason.NOT_PLANNED: "No plan could be made",
}
_BUDGETS: dict[str, str] = {Reason.OUT_OF_DEVICE_MEMORY: "device_budget", Reason.OUT_OF_HOST_MEMORY: "host_budget"}
_PLAN_AGAIN = (
    Reason.DOES_NOT_FIT, Reason.OUT_OF_DEVICE_MEMORY, Reason.OUT_OF_HOST_MEMORY, Reason.PLAN_STALE, Reason.MISSING_EXTRA
)
_OF_THE_INPUT = {Reason.BAD_DATASET: "Choose another dataset", Reason.BAD_MODEL: "Choose another model"}
_SPARE = 1.05
"""A raised budget leaves this much above the peak that it is for."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """One button."""

    label: str
    url: str
    is_post: bool = False


def next_steps(job: Job, *, has_checkpoint: bool) -> tuple[NextStep, ...]:
    """Steps after a failure: the one that most likely helps, then others."""
    reason = str(job.reason)
    goes_on = " from the checkpoint" if has_checkpoint else ""
    retry = NextStep(label=f"Retry unchanged{goes_on}", url=reverse("job_retry", args=[job.pk]), is_post=True)
    if reason in _PLAN_AGAIN:
        again = NextStep(label="Run again with another plan", url=edit_url(job))
        return (again, *_raised_budget(job), retry)
    if reason in _OF_THE_INPUT:
        return (NextStep(label=_OF_THE_INPUT[Reason(reason)], url=edit_url(job)),)
    if reason == Reason.LOSS_NOT_FINITE:
        return (*_slower(job), retry)
    if reason in (Reason.REMOTE_STORE_FULL, Reason.REMOTE_STORE_LOST):
        return (retry, NextStep(label="Run again with another plan", url=edit_url(job)))
    log = NextStep(label="Read the log", url=f"{reverse('job', args=[job.pk])}?tab=logs#tab-panel")
    return (retry, NextStep(label="Edit and run again", url=edit_url(job)), log)


def edit_url(job: Job, **changes: str) -> str:
    """The form for a new job, filled from this one but for ``changes``."""
    if job.kind == Kind.SERVE:
        return f"{reverse('chat')}?{urlencode({'model': job.model_id})}"
    form = reverse("generate_new" if job.kind == Kind.GENERATE else "job_new")
    return f"{form}?{urlencode({'from': job.pk, **changes})}"


def _raised_budget(job: Job) -> tuple[NextStep, ...]:
    """To what was in memory and what was asked for on top of it, or to the predicted peak if that is higher."""
    fields: dict[str, Any] = (job.error or {}).get("fields") or {}
    field = _BUDGETS.get(str(job.reason))
    wanted = (fields.get("in_use_bytes") or 0) + (fields.get("requested_bytes") or 0)
    if field is None or not wanted:
        return ()
    predicted = (job.prediction or {}).get(field.replace("_budget", "_peak_bytes")) or 0
    size = exact_bytes(-(-int(max(wanted, predicted) * _SPARE) // MIB) * MIB)
    label = f"Raise the {field.removesuffix('_budget')} budget to {size}"
    return (NextStep(label=label, url=edit_url(job, **{field: size})),)


def _slower(job: Job) -> tuple[NextStep, ...]:
    rate = job.spec.get("workload", {}).get("learning_rate")
    if not isinstance(rate, int | float) or rate <= 0:
        return (NextStep(label="Edit and run again", url=edit_url(job)),)
    slower = f"{rate / 10:.3g}"
    return (NextStep(label=f"Run again with a learning rate of {slower}", url=edit_url(job, learning_rate=slower)),)
