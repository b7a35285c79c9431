"""The audit trail as a page, newest first: of the whole service, or of one project."""

from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET

from webapp.accounts.access import reachable_projects
from webapp.accounts.audit import records_visible_to
from webapp.accounts.models import Project

PAGE_SIZE = 50


@require_GET
def audit_page(request: HttpRequest) -> HttpResponse:
    return _page(request, None)


@require_GET
def project_audit(request: HttpRequest, project_id: str) -> HttpResponse:
    return _page(request, get_object_or_404(reachable_projects(request.user), pk=project_id))


def _page(request: HttpRequest, project: Project | None) -> HttpResponse:
    who, action, before = (request.GET.get(name, "").strip() for name in ("who", "action", "before"))
    found = records_visible_to(request.user, project_id=project.pk if project else "")
    if who:
        found = found.filter(actor=who)
    if action:
        found = found.filter(action__startswith=action)
    # ids sort by creation time, so one id is the cursor
    page = list((found.filter(pk__lt=before) if before else found).order_by("-pk")[: PAGE_SIZE + 1])
    more, page = len(page) > PAGE_SIZE, page[:PAGE_SIZE]
    filters = {name: value for name, value in (("who", who), ("action", action)) if value}
    context = {
        "project": project,
        "records": page,
        "names": dict(Project.objects.filter(pk__in={row.project_id for row in page}).values_list("pk", "name")),
        "who": who,
        "action": action,
        "filtered": bool(filters or before),
        "older_query": urlencode({**filters, "before": page[-1].pk}) if more else "",
    }
    return render(request, "accounts/audit.html", context)
