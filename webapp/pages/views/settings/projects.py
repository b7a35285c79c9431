"""Projects: which ones somebody belongs to, who else does and as what, which one the pages work in."""

from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from optimizer.base.errors import InvalidInput
from webapp.accounts.access import reachable_projects, role_in
from webapp.accounts.audit import note_target
from webapp.accounts.middleware import SESSION_KEY
from webapp.accounts.models import Project, Role
from webapp.accounts.projects import create_project, remove_member, set_member
from webapp.pages.forms.access import MemberForm, ProjectForm

ROLE_WORDS = {
    Role.VIEWER: "looks at everything, changes nothing",
    Role.MEMBER: "uploads, starts and stops jobs",
    Role.ADMIN: "also decides who belongs to it and where its events are sent",
}


@require_http_methods(["GET", "HEAD", "POST"])
def project_list(request: HttpRequest) -> HttpResponse:
    form = ProjectForm(request.POST if request.method == "POST" else None)
    if form.is_bound and form.is_valid():
        try:
            project = create_project(cast(User, request.user), name=form.cleaned_data["name"])
            note_target(request, project.pk, detail=project.name)
            messages.success(request, f"Project {project.name} is there; say who belongs to it.")
            return redirect("project", project.pk)
        except InvalidInput as error:
            form.add_error("name", error.message)
    rows = [
        {"project": project, "role": role_in(request.user, project.pk), "num_members": project.memberships.count()}
        for project in reachable_projects(request.user).select_related("home_of")
    ]
    return render(request, "accounts/projects.html", {"form": form, "rows": rows})


@require_GET
def project_page(request: HttpRequest, project_id: str) -> HttpResponse:
    return _page(request, _project(request, project_id), MemberForm())


@require_POST
def member_set(request: HttpRequest, project_id: str) -> HttpResponse:
    """Somebody new, or another role for who is there."""
    project = _project(request, project_id)
    form = MemberForm(request.POST)
    if not form.is_valid():
        return _page(request, project, form, status=422)
    name, role = form.cleaned_data["username"], form.cleaned_data["role"]
    try:
        set_member(project, username=name, role=role)
    except InvalidInput as error:
        form.add_error("role" if error.fields["field"] == "role" else "username", error.message)
        return _page(request, project, form, status=422)
    note_target(request, name, detail=role)
    messages.success(request, f"{name} is {role} of {project.name} now.")
    return redirect("project", project.pk)


@require_POST
def member_remove(request: HttpRequest, project_id: str) -> HttpResponse:
    project = _project(request, project_id)
    name = request.POST.get("username", "")
    try:
        if remove_member(project, username=name):
            note_target(request, name)
            messages.success(request, f"{name} no longer belongs to {project.name}.")
    except InvalidInput as error:
        messages.error(request, f"{error.message}.")
    return redirect("project", project.pk)


@require_POST
def work_in(request: HttpRequest) -> HttpResponse:
    """Choose in the header which project the pages show; without one they show all of them."""
    wanted = request.POST.get("project", "")
    if wanted and wanted.isprintable() and reachable_projects(request.user).filter(pk=wanted).exists():
        request.session[SESSION_KEY] = wanted
    else:
        request.session.pop(SESSION_KEY, None)
    back = request.POST.get("next", "")
    is_ours = url_has_allowed_host_and_scheme(back, allowed_hosts=None) and back.startswith("/")
    return redirect(back if is_ours else "jobs")


def _project(request: HttpRequest, project_id: str) -> Project:
    return get_object_or_404(reachable_projects(request.user), pk=project_id)


def _page(request: HttpRequest, project: Project, form: MemberForm, *, status: int = 200) -> HttpResponse:
    role = role_in(request.user, project.pk)
    members = list(project.memberships.select_related("user").order_by("user__username"))
    admins = [member.user_id for member in members if member.role == Role.ADMIN]
    context: dict[str, Any] = {
        "project": project,
        "role": role,
        "members": members,
        # a project keeps one administrator at least, and its owner
        "stay": {project.home_of_id, *(admins if len(admins) == 1 else ())},
        "roles": [(choice.value, ROLE_WORDS[choice]) for choice in Role],
        "form": form,
    }
    return render(request, "accounts/project.html", context, status=status)
