"""The one way a job row moves: a conditional update and its event, in one transaction, announced after the commit.

Leases are counted by the database's clock (``Now()``), so that two machines' clocks need not agree.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from webapp.jobs.documents import state_document
from webapp.jobs.models import LIVE_STATES, USER_JOB_KINDS, Attempt, Event, Job, State
from webapp.webhooks.actions import queue_job_events
from webapp.wire.publish import publish

_ROWS_AT_ONCE: Final = 500

def move_job(
    job_id: str,
    *,
    when: Q,
    changes: dict[str, Any],
    kind: str,
    actor: str,
    reason: str = "",
    message: str = "",
) -> Job | None:
    """Apply ``changes`` if the row still meets ``when``; None, and nothing changed, if it does not.

    The row is locked first where the database can, so the event's ``from_state`` is the state that was left.
    """
    with transaction.atomic():
        before = Job.objects.select_for_update().filter(when, pk=job_id).only("state").first()
        if before is None:
            return None
        if not Job.objects.filter(when, pk=job_id).update(event_seq=F("event_seq") + 1, **changes):
            return None
        job = Job.objects.get(pk=job_id)
        Event.objects.create(
            job=job,
            seq=job.event_seq,
            actor=actor,
            kind=kind,
            from_state=before.state,
            to_state=job.state,
            reason=reason,
            message=message,
        )
        enqueue_webhooks(job, kind)
        transaction.on_commit(lambda: announce(job), robust=True)
    return job


def move_jobs(
    job_ids: Collection[str], *, when: Q, changes: dict[str, Any], kind: str, actor: str, reason: str = "", message: str = ""
) -> list[Job]:
    """``move_job`` for many at once, in a handful of statements; returns those that met ``when`` and were moved.

    They come without their plan and spec. ``changes`` holds the state that all of them have then, or none.
    """
    with transaction.atomic():
        rows = Job.objects.select_for_update().filter(when, pk__in=job_ids).order_by("pk")
        before = dict(rows.values_list("pk", "state"))
        if not before:
            return []
        Job.objects.filter(pk__in=before).update(event_seq=F("event_seq") + 1, **changes)
        moved = list(Job.objects.filter(pk__in=before).defer("spec", "plan").order_by("pk"))
        events = [
            Event(
                job=job,
                seq=job.event_seq,
                actor=actor,
                kind=kind,
                from_state=before[job.pk],
                to_state=job.state,
                reason=reason,
                message=message,
            )
            for job in moved
        ]
        Event.objects.bulk_create(events, batch_size=_ROWS_AT_ONCE)
        for project_id in {job.project_id for job in moved if job.kind in USER_JOB_KINDS}:
            own = [_job_event(job) for job in moved if job.project_id == project_id and job.kind in USER_JOB_KINDS]
            queue_job_events(project_id=project_id, event=f"job.{kind}", data=own)
        transaction.on_commit(lambda: _announce_all(moved), robust=True)
    return moved


def enqueue_webhooks(job: Job, kind: str) -> None:
    """In the transaction of the move. Profiling jobs are the program's own and nobody's news."""
    if job.kind in USER_JOB_KINDS:
        queue_job_events(project_id=job.project_id, event=f"job.{kind}", data=[_job_event(job)])


def _job_event(job: Job) -> dict[str, Any]:
    return {**state_document(job), "predicted_peak_bytes": (job.prediction or {}).get("device_peak_bytes")}


def announce(job: Job) -> None:
    """Put the job's new state on the wire, and ``done`` after the last one."""
    publish(job.pk, "state", state_document(job))
    if job.is_terminal:
        publish(job.pk, "done", {"state": job.state, "reason": job.reason})


def _announce_all(jobs: Sequence[Job]) -> None:
    for job in jobs:
        announce(job)


def held_by(attempt: Attempt) -> Q:
    """The condition that this attempt still owns its job; every write of an attempt carries it."""
    return Q(pk=attempt.job_id, fence=attempt.fence, state__in=LIVE_STATES)


def claimable() -> Q:
    """The condition that a job may be started now."""
    due = Q(not_before__isnull=True) | Q(not_before__lte=Now())
    return due & Q(
        state=State.QUEUED, awaits_plan=False, pause_requested_at__isnull=True, cancel_requested_at__isnull=True
    )
