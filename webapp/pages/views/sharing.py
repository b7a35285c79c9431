"""A run under a link that anyone may read, and the switch that makes and takes back the link."""

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from webapp.jobs.about import find_shared, share_job, unshare_job
from webapp.jobs.metrics import job_metrics
from webapp.jobs.models import Job
from webapp.jobs.queries import jobs_visible_to
from webapp.pages.pictures.job import job_pictures
from webapp.pages.shown.job_head import budget_bytes, describe_job
from webapp.pages.views.job import category_rows, job_places, plan_facts, ranks_context
from webapp.pages.words.plan_names import devices_differ

MAX_POINTS = 1000
_READ = ("id", "name", "kind", "state", "phase", "step", "num_steps", "eta_s", "summary", "prediction", "is_terminal")


@require_GET
@never_cache
def shared_page(request: HttpRequest, job_id: str, signature: str) -> HttpResponse:
    job = _find(job_id, signature)
    rows = category_rows(job)
    context = {
        "is_shared": True,
        "job": job,
        "view": describe_job(job, last_checkpoint_step=None),
        "metrics_url": reverse("shared_metrics", args=[job_id, signature]),
        "facts": {
            "job": _read_facts(job),
            "budget_bytes": budget_bytes(job),
            "devices_differ": devices_differ(job.plan or {}),
            "categories": [{"key": row["key"], "label": row["label"]} for row in rows],
        },
        "categories": rows,
        "places": job_places(job),
        "pictures": job_pictures(job, budget_bytes=budget_bytes(job)),
        "tab": "execution",
        **ranks_context(job),
        **plan_facts(job),
    }
    answer = render(request, "jobs/shared.html", context)
    answer["X-Robots-Tag"] = "noindex"
    return answer


@require_GET
@never_cache
def shared_metrics(request: HttpRequest, job_id: str, signature: str) -> JsonResponse:
    """The measurements behind the page's charts, as the API gives them."""
    return JsonResponse(job_metrics(_find(job_id, signature).pk, max_points=MAX_POINTS, fields=None))


@require_POST
@login_required
def job_share(request: HttpRequest, job_id: str) -> HttpResponse:
    """``share`` is ``yes`` or ``no``."""
    job = get_object_or_404(jobs_visible_to(request.user), pk=job_id)
    if request.POST.get("share") == "yes":
        share_job(job)
        messages.success(request, "Anyone with the link can read this run now; the link is under Share.")
    else:
        unshare_job(job)
        messages.success(request, "The link leads nowhere any more.")
    return redirect("job", job.pk)


def _find(job_id: str, signature: str) -> Job:
    job = find_shared(job_id, signature)
    if job is None:
        raise Http404
    return job


def _read_facts(job: Job) -> dict[str, Any]:
    """The fields that the charts need; ids of rows, people, notes and plans stay here."""
    facts = {name: getattr(job, name) for name in _READ}
    return {**facts, "spec": {"workload": job.spec.get("workload", {})}}
