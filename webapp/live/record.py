"""Reads a stream's data from the database: the snapshot it begins with, and what is new while Redis is away.

Each read runs in a thread that gives its connection back at once: a stream may stay open for hours and must hold none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import Q

from webapp.accounts.access import acting_of
from webapp.accounts.tokens import is_still_valid
from webapp.jobs.documents import job_document, state_document
from webapp.jobs.metrics import job_metrics
from webapp.jobs.models import Checkpoint, Job, Sample
from webapp.jobs.queries import jobs_visible_to

T = TypeVar("T")
SNAPSHOT_POINTS = 1_000
_BATCH = 500


@dataclass
class Seen:
    """Position up to which one client has been served from the database."""

    sample_pk: int = 0
    checkpoint_pk: int = 0
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class News:
    """Events since the last look, in order, and whether the job has ended."""

    events: list[tuple[str, dict[str, Any]]]
    is_ended: bool


async def from_database(read: Callable[[], T]) -> T:
    """Off the event loop, and with no connection kept."""

    def run() -> T:
        try:
            return read()
        finally:
            connections.close_all()

    return await sync_to_async(run, thread_sensitive=False)()


def read_snapshot(job_id: str, seen: Seen) -> tuple[dict[str, Any], bool]:
    """``{"job", "metrics"}`` and whether the job has ended. Marks as seen before it reads, so that nothing is skipped."""
    mark_seen(job_id, seen)
    job = Job.objects.select_related("machine").get(pk=job_id)
    seen.state = state_document(job)
    return {"job": job_document(job), "metrics": job_metrics(job_id, max_points=SNAPSHOT_POINTS)}, job.is_terminal


def mark_seen(job_id: str, seen: Seen) -> None:
    newest_sample = Sample.objects.filter(job_id=job_id).order_by("-pk").values_list("pk", flat=True).first()
    newest_checkpoint = Checkpoint.objects.filter(job_id=job_id).order_by("-pk").values_list("pk", flat=True).first()
    seen.sample_pk, seen.checkpoint_pk = newest_sample or 0, newest_checkpoint or 0


def read_news(job_id: str, seen: Seen) -> News:
    """New samples, checkpoints and the state if it changed; advances ``seen``."""
    after = Q(job_id=job_id)
    samples = list(Sample.objects.filter(after, pk__gt=seen.sample_pk).order_by("pk")[:_BATCH])
    checkpoints = list(Checkpoint.objects.filter(after, pk__gt=seen.checkpoint_pk).order_by("pk")[:_BATCH])
    job = Job.objects.get(pk=job_id)
    events = [("sample", sample.data) for sample in samples]
    events += [("checkpoint", _checkpoint(checkpoint)) for checkpoint in checkpoints]
    state = state_document(job)
    if state != seen.state:
        events.append(("state", state))
    seen.sample_pk = samples[-1].pk if samples else seen.sample_pk
    seen.checkpoint_pk = checkpoints[-1].pk if checkpoints else seen.checkpoint_pk
    seen.state = state
    return News(events=events, is_ended=job.is_terminal and len(samples) < _BATCH)


def may_still_watch(user: Any, job_id: str) -> bool:
    """Asked again during a stream: the user may have been deactivated, their token revoked, their role taken away."""
    user.refresh_from_db()
    token_id = acting_of(user).token_id
    is_known = is_still_valid(token_id) if token_id else bool(user.is_active)
    return is_known and jobs_visible_to(user).filter(pk=job_id).exists()


def ended_state(job_id: str) -> dict[str, Any] | None:
    """The state of a job that has ended; None while it goes on."""
    job = Job.objects.get(pk=job_id)
    return state_document(job) if job.is_terminal else None


def done_document(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": state.get("state"), "reason": state.get("reason")}


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "folder": checkpoint.folder,
        "manifest_sha256": checkpoint.manifest_sha256,
        "num_bytes": checkpoint.num_bytes,
    }
