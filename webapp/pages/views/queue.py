"""The queue above the list of jobs: what waits, in which order and why, what is at work; a job is moved by a button."""

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from optimizer.base.errors import HeadroomError
from webapp.accounts.access import is_service_admin
from webapp.accounts.permissions import refusal_of
from webapp.jobs.actions import pause_job, resume_job, set_priority
from webapp.jobs.models import Job
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.queue import read_queue
from webapp.pages.presentation import eta_words
from webapp.pages.shown.job_head import state_words

MAX_SHOWN = 20
"""Jobs of the queue that are shown with their buttons; the list below has all."""
_MOVES = {"sooner": 1, "later": -1}
_HOLDS = {"pause": pause_job, "resume": resume_job}


@require_GET
@login_required
def queue_page(request: HttpRequest) -> HttpResponse:
    """The rows, for the page of jobs that shows them; the address by itself leads there."""
    return _shown(request) if request.htmx else redirect("jobs")  # type: ignore[attr-defined]


def _shown(request: HttpRequest, *, refused: str = "") -> HttpResponse:
    return render(request, "jobs/queue_rows.html", queue_context(request, refused=refused))


def queue_context(request: HttpRequest, *, refused: str = "") -> dict[str, Any]:
    """Values for the rows of what waits and what is at work."""
    queue = read_queue(request.user, page_size=MAX_SHOWN)
    known: dict[str | None, str] = {}
    return {
        "waiting": [{"row": row, "refused": _refused_move(request, row.job, known)} for row in queue.waiting],
        "num_hidden": queue.num_own - len(queue.waiting),
        "num_others": queue.num_waiting - queue.num_own,
        "live": [
            {"job": job, "words": state_words(job), "eta": eta_words(job.eta_s, state=job.state)} for job in queue.live
        ],
        "may_overtake": is_service_admin(request.user),
        "refused_move": refused,
    }


def _refused_move(request: HttpRequest, job: Job, known: dict[str | None, str]) -> str:
    """The reason why somebody may not move a job; the same for all jobs of a project, so it is asked once for each."""
    if job.project_id not in known:
        error = refusal_of(request.user, "POST", reverse("queue_move", args=[job.pk]))
        known[job.project_id] = "" if error is None else f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip()
    return known[job.project_id]


@require_POST
@login_required
def queue_move(request: HttpRequest, job_id: str) -> HttpResponse:
    """One step sooner or later, paused or resumed; anything else changes nothing.

    On the page the rows come back in place, so that who moves a job by the keyboard stays at its button.
    """
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id)
    refused = ""
    to, actor = request.POST.get("to", ""), f"user:{request.user.get_username()}"
    try:
        if to in _HOLDS:
            _HOLDS[to](job, actor=actor)
        else:
            priority = job.priority + _MOVES.get(to, 0)
            set_priority(job, priority, actor=actor, may_overtake=is_service_admin(request.user))
    except HeadroomError as error:
        refused = f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip()
    if request.htmx:  # type: ignore[attr-defined]
        return _shown(request, refused=refused)
    if refused:
        messages.error(request, refused)
    return redirect("jobs")
