"""The list of jobs with the queue above it: filtered, sorted, grouped, a page at a time, refreshed in place."""

from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from webapp.catalog.bundled import example_spec
from webapp.jobs.models import LIVE_STATES, Job, State
from webapp.jobs.queries import filters_of, jobs_visible_to
from webapp.pages.presentation import eta_words
from webapp.pages.shown.job_head import state_words
from webapp.pages.shown.job_rows import COLUMNS, GROUPS, PAGE_SIZE, Page, View, read_page, read_view
from webapp.pages.views.queue import queue_context

__all__ = ["PAGE_SIZE", "job_list"]


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    view = read_view(request.GET)
    visible = jobs_visible_to(request.user)
    page = read_page(visible, view)
    context = {
        "jobs": [_row(job, view, page) for job in page.jobs],
        "any_jobs": bool(page.jobs) or visible.exists(),
        "has_example": not page.jobs and example_spec() is not None,
        "view": view,
        "filtered": bool(view.query or view.state or view.tag or view.before or view.page > 1),
        "newer": bool(view.before or view.page > 1),
        "first_url": _url(view.parameters()),
        "older_url": _older_url(view, page),
        "refresh_url": _url([*view.parameters(), *_place(view)]),
        "headings": _headings(view),
        "query_text": urlencode(view.parameters()),
    }
    if request.htmx:  # type: ignore[attr-defined]
        return render(request, "jobs/list_rows.html", context)
    return render(request, "jobs/list.html", context | _frame(request, view))


def _frame(request: HttpRequest, view: View) -> dict[str, Any]:
    """Parts of the page that a refresh leaves as they are."""
    has_queue = jobs_visible_to(request.user).filter(state__in=(State.QUEUED, *LIVE_STATES)).exists()
    return {
        "states": ("waiting", *(state for state in State.values if state != State.QUEUED)),
        "groups": GROUPS,
        "columns": [(name, name in view.columns) for name in COLUMNS],
        "saved": [{"name": kept.name, "url": f"{reverse('jobs')}?{kept.query}"} for kept in filters_of(request.user)],
        **({"has_queue": True, **queue_context(request)} if has_queue else {}),
    }


def _row(job: Job, view: View, page: Page) -> dict[str, Any]:
    live_detail = job.phase.replace("_", " ") if job.phase else ""
    budget = getattr(job, "budget", None)
    return {
        "job": job,
        "state_words": state_words(job),
        "detail": (job.reason.replace("_", " ") if job.reason != "done" else "") if job.is_terminal else live_detail,
        "eta": eta_words(job.eta_s, state=job.state),
        "budget_bytes": int(budget) if budget is not None else None,
        "spark": page.sparks.get(job.pk, ""),
        "group": _group_of(job, view.group),
    }


def _group_of(job: Job, group: str) -> str:
    names = {"model": job.model.name, "dataset": job.dataset.name if job.dataset else "no dataset", "state": job.state}
    return names.get(group, "")


_TITLES = {"peak": "Peak", "speed": "Tokens/s", "loss": "Loss", "created": "Created"}
_SORTED_COLUMNS = {"name": "Job", "state": "State", **_TITLES}


def _headings(view: View) -> dict[str, dict[str, str]]:
    """For each column that can be sorted: the address that sorts by it, or turns it round, and how it is sorted now."""
    found = {}
    for name, title in _SORTED_COLUMNS.items():
        is_sorted = view.sort == name
        ascends = not view.is_ascending if is_sorted else name in ("name", "state", "loss")
        found[name] = {
            "title": title,
            "url": _url(view.parameters(sort=f"{'' if ascends else '-'}{name}")),
            "sorted": ("ascending" if view.is_ascending else "descending") if is_sorted else "none",
        }
    return found


def _place(view: View) -> list[tuple[str, str]]:
    if view.before:
        return [("before", view.before)]
    return [("page", str(view.page))] if view.page > 1 else []


def _older_url(view: View, page: Page) -> str:
    if not page.has_more:
        return ""
    place = ("before", page.jobs[-1].pk) if view.is_by_creation else ("page", str(view.page + 1))
    return _url([*view.parameters(), place])


def _url(parameters: list[tuple[str, str]]) -> str:
    base = reverse("jobs")
    return f"{base}?{urlencode(parameters)}" if parameters else base
