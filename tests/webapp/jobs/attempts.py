"""Attempts of jobs as a worker makes them, and the results that it hands in."""

from webapp.jobs.actions import record_started
from webapp.jobs.claiming import claim_job
from webapp.jobs.models import Job

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
