"""Fills the frame of every page: the projects to work in, where there is a choice, an alarm, and the theme."""

from typing import Any

from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from webapp.accounts.access import acting_of, reachable_projects
from webapp.attempts.leading import find_alarm

MAX_PROJECTS = 200
THEME_COOKIE = "theme"
THEMES = ("system", "light", "dark")
"""``system`` follows the browser, and is the absence of the cookie."""


def work_in(request: HttpRequest) -> dict[str, Any]:
    """Asked of the database only by a template that draws the frame: fragments are drawn every few seconds."""
    return {"work_in": SimpleLazyObject(lambda: _choice(request))}


def _choice(request: HttpRequest) -> dict[str, Any]:
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {"projects": [], "chosen": ""}
    found = list(reachable_projects(user)[:MAX_PROJECTS])
    return {"projects": found if len(found) > 1 else [], "chosen": acting_of(user).project_id}


def alarm(request: HttpRequest) -> dict[str, Any]:
    """The fault of the service that those who are signed in should know of; asked as ``work_in`` is."""
    return {"service_alarm": SimpleLazyObject(find_alarm)}


def theme(request: HttpRequest) -> dict[str, str]:
    chosen = request.COOKIES.get(THEME_COOKIE, "")
    return {"theme": chosen if chosen in THEMES else "system"}
