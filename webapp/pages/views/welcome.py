"""The page that the service opens on until a person has a job of their own: the demo's run, and three ways on."""

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET

from webapp.catalog.bundled import example_spec
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.queries import jobs_visible_to
from webapp.pages.shown.demo_run import demo_run

DEMO_NAMES = "demo"


@require_GET
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """The list of jobs, once there is a job that the demo has not made."""
    own = jobs_visible_to(request.user).exclude(name__contains=DEMO_NAMES)
    return redirect("jobs") if own.exists() else welcome_page(request)


@require_GET
@login_required
def welcome_page(request: HttpRequest) -> HttpResponse:
    machine = machines_visible_to(request.user).order_by("-last_seen_at").first()
    context = {
        "run": demo_run(request.user),
        "device": machine.document["device"] if machine else None,
        "has_example": example_spec() is not None,
        "origin": request.build_absolute_uri("/").rstrip("/"),
    }
    return render(request, "welcome.html", context)
