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
from webapp.live.slots import full_words
from webapp.live.stream import full_limit, job_events

router = Router()


@router.get("/jobs/{job_id}/events", auth=AsyncTokenOrSession(), tags=["jobs"])
async def get_events(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """``Accept: text/event-stream`` follows the job live and resumes after ``Last-Event-ID``; JSON lists its moves in order."""
    user: Any = request.auth  # type: ignore[attr-defined]
    wants_stream = "text/event-stream" in request.headers.get("Accept", "")
    # in the thread that found out who asks, which has a connection already
    found = await sync_to_async(_read)(user, job_id, with_events=not wants_stream)
    if found is None:
        raise Http404
    project_id, events = found
    if not wants_stream:
        return JsonResponse({"results": events, "next": None, "previous": None})
    if full := await full_limit(user, project_id=project_id):
        return _refuse(full)
    last_event_id = request.headers.get("Last-Event-ID", "")
    stream = job_events(user, job_id, project_id=project_id, last_event_id=last_event_id)
    response = ClosedStream(stream, content_type="text/event-stream")
    response["Cache-Control"] = "no-store, no-transform"
    response["X-Accel-Buffering"] = "no"
    return response


def _refuse(full: str) -> HttpResponseBase:
    hint = "Close a page that follows a job."
    return problem(503, code="too_many_streams", detail=full_words(full), hint=hint, headers={"Retry-After": "10"})


def _read(user: Any, job_id: str, *, with_events: bool) -> tuple[str, list[dict[str, Any]]] | None:
    """The job's project and its events; None where the user does not see it."""
    found = jobs_visible_to(user).filter(pk=job_id).values_list("project_id", flat=True)[:1]
    if not found:
        return None
    events = events_visible_to(user).filter(job_id=job_id).order_by("seq")
    return found[0] or "", event_documents(events) if with_events else []
