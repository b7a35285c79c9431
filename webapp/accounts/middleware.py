"""The gate of the pages, and the audit trail of every request that changes something.

Pages are admitted here; the API admits in its own authentication, since who asks is known only there.
"""

from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.shortcuts import render

from webapp.accounts.access import Acting, act_as, reachable_projects
from webapp.accounts.audit import record_request
from webapp.accounts.errors import Forbidden, NotSignedInError
from webapp.accounts.permissions import admit, methods_of, project_of_row, route_of, rule_of

API_PREFIXES = ("/api/v1/", "/v1/", "/metrics")
"""Addresses that programs ask: they take tokens, and admit by themselves."""
SESSION_KEY = "project"
"""Session key of the project that was chosen in the header of a page."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessMiddleware:
    """After authentication: ``request.user`` is who the session names."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self.is_async:
            return self._call_async(request)
        response = self.get_response(request)
        _audit(request, response)
        return response

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = await self.get_response(request)
        if _is_audited(request, response):
            await sync_to_async(_audit)(request, response)
        return response

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> HttpResponseBase | None:
        """None lets the page's view answer."""
        if request.path.startswith(API_PREFIXES):
            return None
        method, route = route_of(request)
        if rule_of(method, route) is None and (known := methods_of(route)):
            return HttpResponseNotAllowed(known)
        try:
            if request.user.is_authenticated:
                act_in_session(request)
            admit(request, request.user)
        except NotSignedInError:
            # A part of a page is not where to log in: the page says so in its place (app.js).
            is_part = "HX-Request" in request.headers
            return HttpResponse(status=401) if is_part else redirect_to_login(request.get_full_path())
        except Forbidden as error:
            request.was_refused = error.message  # type: ignore[attr-defined]
            return render(request, "forbidden.html", {"error": error}, status=403)
        return None


def answer_old_page(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Answers a form of a page that was opened before its reader last logged in. Status 403; app.js asks again by itself."""
    error = Forbidden(
        "this page was opened before you last logged in",
        hint="Go back, reload the page and send it again; what you typed is still there.",
    )
    response = render(request, "forbidden.html", {"error": error}, status=403)
    response["X-Login-Changed"] = "yes"
    return response


def act_in_session(request: HttpRequest) -> None:
    """Take up the project that the session has chosen; one that is no longer theirs is forgotten."""
    user: Any = request.user
    act_as(user, Acting())
    chosen = request.session.get(SESSION_KEY, "")
    if chosen and not reachable_projects(user).filter(pk=chosen).exists():
        del request.session[SESSION_KEY]
        chosen = ""
    act_as(user, Acting(project_id=chosen))


def _is_audited(request: HttpRequest, response: HttpResponseBase) -> bool:
    if response.status_code < 400 and getattr(request, "is_recorded", False):
        return False
    rule = getattr(request, "permission_rule", None)
    if rule is None or not rule.action or request.method in _SAFE_METHODS:
        return False
    return response.status_code == 403 or _is_done(request, response)


def _is_done(request: HttpRequest, response: HttpResponseBase) -> bool:
    """A page that is shown again says what was wrong with the form, unless its view has named what it did."""
    if hasattr(request, "audit_target"):
        return response.status_code < 400
    is_page = not request.path.startswith(API_PREFIXES)
    return response.status_code in (302, 303) if is_page else response.status_code < 300


def _audit(request: HttpRequest, response: HttpResponseBase) -> None:
    if not _is_audited(request, response):
        return
    if not hasattr(request, "audit_target") and not _names_row(request):
        # what is new is named by where the answer leads
        location = response.headers.get("Location", "")
        request.audit_target = location.rstrip("/").rpartition("/")[2]  # type: ignore[attr-defined]
    if not getattr(request, "audit_project_id", ""):
        request.audit_project_id = project_of_row(getattr(request, "audit_target", ""))  # type: ignore[attr-defined]
    is_refused = response.status_code == 403
    detail = str(getattr(request, "was_refused", "")) if is_refused else ""
    record_request(request, outcome="refused" if is_refused else "done", detail=detail)


def _names_row(request: HttpRequest) -> bool:
    match = request.resolver_match
    return match is not None and bool(match.kwargs)
