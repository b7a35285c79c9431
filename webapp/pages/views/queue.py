"""The queue as a page: what waits, in which order and why, what is at work; a job is moved by a button."""

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from optimizer.base.errors import HeadroomError
from webapp.accounts.access import is_service_admin
from webapp.jobs.actions import pause_job, resume_job, set_priority
from webapp.jobs.queries import jobs_visible_to
from webapp.jobs.queue import read_queue
from webapp.pages.presentation import eta_words
from webapp.pages.shown.job_head import state_words

_MOVES = {"sooner": 1, "later": -1}
_HOLDS = {"pause": pause_job, "resume": resume_job}


@require_GET
@login_required
def queue_page(request: HttpRequest) -> HttpResponse:
    return _shown(request)


def _shown(request: HttpRequest, *, refused: str = "") -> HttpResponse:
    queue = read_queue(request.user)
    context = {
        "waiting": queue.waiting,
        "num_others": queue.num_waiting - len(queue.waiting),
        "live": [
            {"job": job, "words": state_words(job), "eta": eta_words(job.eta_s, state=job.state)} for job in queue.live
        ],
        "may_overtake": is_service_admin(request.user),
        "refused_move": refused,
    }
    return render(request, "jobs/queue_rows.html" if request.htmx else "jobs/queue.html", context)  # type: ignore[attr-defined]


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
    return redirect("queue")
