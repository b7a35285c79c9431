"""``/queue``, and a job's place in it."""

from typing import Any, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from webapp.accounts.access import is_service_admin
from webapp.http.idempotency import idempotent, remember
from webapp.jobs import actions, documents
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.queue import read_queue

router = Router()


class WaitingJob(Schema):
    """One queued job of yours, and why it waits."""

    id: str
    name: str
    position: int
    priority: int
    reason: Literal["paused", "not_yet", "no_machine", "offline", "busy", "next"]
    sentence: str
    machines: list[str]


class LiveJob(Schema):
    """One job of yours that is being carried out."""

    id: str
    name: str
    state: str
    worker: str
    eta_s: float | None


class QueueAnswer(Schema):
    """Your jobs at their place among all people's."""

    num_waiting: int
    waiting: list[WaitingJob]
    live: list[LiveJob]


class PriorityBody(Schema, extra="forbid"):
    """The priority that a job is to have."""

    priority: int = Field(
        default=0,
        ge=-actions.MAX_PRIORITY,
        le=actions.MAX_PRIORITY,
        description="higher starts first; above 0 for administrators; 0 as new jobs have it",
    )


@router.get("/queue", response=QueueAnswer, tags=["jobs"])
def get_queue(request: HttpRequest) -> dict[str, Any]:
    """Your waiting jobs in the order in which they will be taken, with why each waits, and those at work."""
    queue = read_queue(request.user)
    return {
        "num_waiting": queue.num_waiting,
        "waiting": [
            {
                "id": each.job.pk,
                "name": each.job.name,
                "position": each.position,
                "priority": each.job.priority,
                "reason": each.reason,
                "sentence": each.sentence,
                "machines": list(each.machines),
            }
            for each in queue.waiting
        ],
        "live": [
            {"id": job.pk, "name": job.name, "state": job.state, "worker": job.worker, "eta_s": job.eta_s}
            for job in queue.live
        ],
    }


@router.post("/jobs/{job_id}/priority", response={200: dict[str, Any]}, tags=["jobs"])
@idempotent
def set_priority(request: HttpRequest, job_id: str, body: PriorityBody) -> HttpResponse:
    """Move a waiting job: higher starts first, equals by age."""
    job = jobs_visible_to(request.user).filter(pk=job_id).first()
    if job is None:
        raise Http404
    with transaction.atomic():
        moved = actions.set_priority(
            job,
            body.priority,
            actor=f"user:{request.user.get_username()}",
            may_overtake=is_service_admin(request.user),
        )
        return remember(request, status=200, body=documents.job_document(moved))
