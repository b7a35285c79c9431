"""The list of jobs: newest first, filtered by name and state, a page at a time, refreshed in place."""

from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET

from webapp.catalog.bundled import example_spec
from webapp.jobs.models import Job, State
from webapp.jobs.queries import jobs_visible_to
from webapp.pages.presentation import eta_words
from webapp.pages.shown.job_head import budget_bytes, state_words

PAGE_SIZE = 25


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    return redirect("jobs")


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    query, state, before = (request.GET.get(name, "").strip() for name in ("q", "state", "before"))
    visible = jobs_visible_to(request.user).select_related("model", "dataset")
    found = visible
    if query:
        found = found.filter(name__icontains=query)
    if state in State.values:
        found = found.filter(state=state)
    # ids sort by creation time, so one id is the cursor
    page = list((found.filter(pk__lt=before) if before else found).order_by("-pk")[: PAGE_SIZE + 1])
    more, page = len(page) > PAGE_SIZE, page[:PAGE_SIZE]
    filters = {name: value for name, value in (("q", query), ("state", state)) if value}
    context = {
        "jobs": [_row(job) for job in page],
        "any_jobs": bool(page) or visible.exists(),
        "has_example": not page and example_spec() is not None,
        "filtered": bool(filters or before),
        "query": query,
        "selected_state": state,
        "states": State.values,
        "newer": bool(before),
        "first_url": _url(filters),
        "older_url": _url({**filters, "before": page[-1].pk}) if more else "",
        "refresh_url": _url({**filters, **({"before": before} if before else {})}),
    }
    return render(request, "jobs/list_rows.html" if request.htmx else "jobs/list.html", context)  # type: ignore[attr-defined]


def _row(job: Job) -> dict[str, Any]:
    live_detail = job.phase.replace("_", " ") if job.phase else ""
    return {
        "job": job,
        "state_words": state_words(job),
        "detail": (job.reason.replace("_", " ") if job.reason != "done" else "") if job.is_terminal else live_detail,
        "eta": eta_words(job.eta_s, state=job.state),
        "budget_bytes": budget_bytes(job),
    }


def _url(parameters: dict[str, str]) -> str:
    base = reverse("jobs")
    return f"{base}?{urlencode(parameters)}" if parameters else base
