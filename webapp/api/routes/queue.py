"""``/queue``, and a job's place in it."""

from typing import Annotated, Any, Literal

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from webapp.accounts.access import is_service_admin
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import MAX_PAGE_SIZE
from webapp.jobs import actions, documents
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.queue import PAGE_SIZE, read_queue

router = Router()


class WaitingJob(Schema):
    """One queued job of yours, and why it waits."""

    id: str
    name: str
    position: int
    priority: int
    reason: Literal["paused", "no_plan", "not_yet", "no_machine", "offline", "busy", "next"]
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
    """Counted over all people."""
    num_own: int
    """Yours, on all pages."""
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
def get_queue(
    request: HttpRequest,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    page_size: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = PAGE_SIZE,
) -> dict[str, Any]:
    """A page of your waiting jobs in the order in which they will be taken, with why each waits, and those at work."""
    queue = read_queue(request.user, page=page, page_size=page_size)
    return {
        "num_waiting": queue.num_waiting,
        "num_own": queue.num_own,
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
    """Move a waiting job: higher starts first, equals by turn."""
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
