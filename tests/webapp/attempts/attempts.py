"""Attempts of jobs as a worker makes them, and the results that it hands in."""

from typing import Any

from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_started
from webapp.catalog.models import Machine
from webapp.jobs.models import Attempt, Job

DONE: dict[str, Any] = {
    "outcome": "succeeded",
    "reason": "done",
    "message": "",
    "error": None,
    "step": 10,
    "measured": None,
    "summary": {},
    "artifacts": [],
}
DRAINED: dict[str, Any] = {**DONE, "outcome": "drained", "reason": "", "step": 4}


def failed(reason: str, message: str = "it broke") -> dict[str, Any]:
    return {**DONE, "outcome": "failed", "reason": reason, "message": message, "error": {"code": reason}}


def run(machine: Machine, **arguments: Any) -> Attempt:
    attempt = claim_job(worker="w", machine=machine, **arguments)
    assert attempt is not None
    assert record_started(attempt, pid=1)
    return attempt


def kinds(job: Job) -> list[str]:
    return list(job.events.values_list("kind", flat=True))


def reread(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)
