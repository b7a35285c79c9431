"""``GET /jobs/{id}/events``: live for those who accept an event stream, else the event rows as JSON."""

from typing import Any

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase, JsonResponse
from ninja import Router

from webapp.http.auth import AsyncTokenOrSession
from webapp.http.problems import problem
from webapp.http.streaming import ClosedStream
from webapp.jobs.documents import event_documents
from webapp.jobs.queries import events_visible_to, jobs_visible_to
from webapp.live.stream import has_free_slot, job_events

router = Router()


@router.get("/jobs/{job_id}/events", auth=AsyncTokenOrSession(), tags=["jobs"])
async def get_events(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """``Accept: text/event-stream`` follows the job live and resumes after ``Last-Event-ID``; JSON lists its moves in order."""
    user: Any = request.auth  # type: ignore[attr-defined]
    wants_stream = "text/event-stream" in request.headers.get("Accept", "")
    # in the thread that found out who asks, which has a connection already
    events = await sync_to_async(_read)(user, job_id, with_events=not wants_stream)
    if events is None:
        raise Http404
    if not wants_stream:
        return JsonResponse({"results": events, "next": None, "previous": None})
    if not has_free_slot(user):
        return problem(
            503,
            code="too_many_streams",
            detail="too many live streams are open",
            hint="Close a page that follows a job.",
            headers={"Retry-After": "10"},
        )
    last_event_id = request.headers.get("Last-Event-ID", "")
    response = ClosedStream(job_events(user, job_id, last_event_id=last_event_id), content_type="text/event-stream")
    response["Cache-Control"] = "no-store, no-transform"
    response["X-Accel-Buffering"] = "no"
    return response


def _read(user: Any, job_id: str, *, with_events: bool) -> list[dict[str, Any]] | None:
    if not jobs_visible_to(user).filter(pk=job_id).exists():
        return None
    return event_documents(events_visible_to(user).filter(job_id=job_id).order_by("seq")) if with_events else []
