"""Buttons of the list of jobs and of a job's head: names, tags, notes, deletion, many jobs at once, and views that are kept."""

from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect
from django.template.loader import render_to_string
from django.urls import reverse
from django.views.decorators.http import require_POST

from optimizer.base.errors import HeadroomError
from webapp.accounts.audit import note_target
from webapp.accounts.permissions import refusal_of
from webapp.jobs.about import delete_job, describe_job_as, forget_filter, restore_job, save_filter
from webapp.jobs.actions import cancel_jobs
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Job
from webapp.jobs.queries import deleted_jobs_visible_to, jobs_visible_to

MAX_AT_ONCE: Final = 100
MAX_COMPARED: Final = 10


@require_POST
@login_required
def job_about(request: HttpRequest, job_id: str) -> HttpResponse:
    """Name, tags (parted by commas) and notes, those that the form sent."""
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id)
    typed = request.POST
    tags = typed["tags"].split(",") if "tags" in typed else None
    try:
        describe_job_as(job, name=typed.get("name"), tags=tags, notes=typed.get("notes"))
        messages.success(request, "Saved.")
    except HeadroomError as error:
        messages.error(request, _sentence(error))
    return redirect("job", job.pk)


@require_POST
@login_required
def job_delete(request: HttpRequest, job_id: str) -> HttpResponse:
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id)
    try:
        delete_job(job)
    except HeadroomError as error:
        messages.error(request, _sentence(error))
        return redirect("job", job.pk)
    _offer_undo(request, [job])
    return redirect("jobs")


@require_POST
@login_required
def job_restore(request: HttpRequest, job_id: str) -> HttpResponse:
    job = get_object_or_404(deleted_jobs_visible_to(request.user), pk=job_id)
    restore_job(job)
    return redirect("job", job.pk)


@require_POST
@login_required
def jobs_bulk(request: HttpRequest) -> HttpResponse:
    """One action on every chosen job; what a role or a state forbids is counted and said."""
    ids = list(dict.fromkeys(request.POST.getlist("job")))[:MAX_AT_ONCE]
    action, back = request.POST.get("action", ""), f"{reverse('jobs')}?{_own_query(request)}"
    if action == "compare":
        return redirect(f"{reverse('job_compare')}?{urlencode([('job', job_id) for job_id in ids[:MAX_COMPARED]])}")
    if action == "restore":
        restored = [restore_job(job) for job in deleted_jobs_visible_to(request.user).filter(pk__in=ids)]
        messages.success(request, f"Restored {_count(restored)}.")
        return redirect(back)
    if not ids:
        messages.error(request, "Choose one or more jobs first.")
        return redirect(back)
    done, refused = _each(request, ids, action)
    note_target(request, ",".join(job.pk for job in done)[:200], detail=action)
    if done and action == "delete":
        _offer_undo(request, done)
    elif done:
        messages.success(request, f"{_DONE.get(action, 'Changed')} {_count(done)}.")
    for text in dict.fromkeys(refused):
        messages.error(request, text)
    return redirect(back)


_DONE: Final = {"cancel": "Asked to stop", "tag": "Tagged"}
_ROUTES: Final = {"cancel": "job_cancel", "delete": "job_delete", "tag": "job_about"}


def _each(request: HttpRequest, ids: list[str], action: str) -> tuple[list[Job], list[str]]:
    tag = request.POST.get("tag", "").strip()
    acts: dict[str, Callable[[Job], object]] = {
        "cancel": lambda job: None,  # all at once, below
        "delete": delete_job,
        "tag": lambda job: describe_job_as(job, tags=[*job.tags, tag]),
    }
    if action not in acts or (action == "tag" and not tag):
        return [], ["Type a tag first." if action == "tag" else "Choose what to do with them."]
    done, refused = [], []
    for job in jobs_visible_to(request.user).filter(pk__in=ids):
        error = refusal_of(request.user, "POST", reverse(_ROUTES[action], args=[job.pk]))
        try:
            if error is not None:
                raise error
            acts[action](job)
            done.append(job)
        except HeadroomError as found:
            refused.append(_sentence(found))
    return _stop_all(request, done, refused) if action == "cancel" else (done, refused)


def _stop_all(request: HttpRequest, jobs: Sequence[Job], refused: list[str]) -> tuple[list[Job], list[str]]:
    outcomes = cancel_jobs([job.pk for job in jobs], mode="save", actor=f"user:{request.user.get_username()}")
    ended = [job for job in jobs if outcomes.get(job.pk) == "ended"]
    allowed = "queued, starting or running"
    over = [_sentence(WrongState("cancel", job_id=job.pk, state=str(job.state), allowed=allowed)) for job in ended]
    return [job for job in jobs if job not in ended], [*refused, *over]


@require_POST
@login_required
def filters_change(request: HttpRequest) -> HttpResponse:
    """Keep the view that is shown under a name, or forget one."""
    if name := request.POST.get("forget", ""):
        forget_filter(request.user, name=name)
        return redirect("jobs")
    query = _own_query(request)
    try:
        kept = save_filter(request.user, name=request.POST.get("name", ""), query=query)
        messages.success(request, f"Kept as “{kept.name}”.")
    except HeadroomError as error:
        messages.error(request, _sentence(error))
    return redirect(f"{reverse('jobs')}?{query}")


def _own_query(request: HttpRequest) -> str:
    return QueryDict(request.POST.get("query", "")[:2000]).urlencode()


def _offer_undo(request: HttpRequest, jobs: list[Job]) -> None:
    context = {"ids": [job.pk for job in jobs], "words": f"Deleted {_count(jobs)}; the files go in seven days."}
    messages.success(request, render_to_string("jobs/undo_delete.html", context, request=request))


def _count(jobs: list[Job]) -> str:
    return jobs[0].name if len(jobs) == 1 else f"{len(jobs)} jobs"


def _sentence(error: HeadroomError) -> str:
    return f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}".strip()
