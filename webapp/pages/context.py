"""Fills the frame of every page: the projects to work in, where there is a choice."""

from typing import Any

from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from webapp.accounts.access import acting_of, reachable_projects

MAX_PROJECTS = 200


def work_in(request: HttpRequest) -> dict[str, Any]:
    """Asked of the database only by a template that draws the frame: fragments are drawn every few seconds."""
    return {"work_in": SimpleLazyObject(lambda: _choice(request))}


def _choice(request: HttpRequest) -> dict[str, Any]:
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {"projects": [], "chosen": ""}
    found = list(reachable_projects(user)[:MAX_PROJECTS])
    return {"projects": found if len(found) > 1 else [], "chosen": acting_of(user).project_id}
