"""Identifies the caller of the API: a bearer token, else a session with CSRF. A token that is sent decides alone;
cookies are then ignored."""

from typing import Any, cast

from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja.security.base import AuthBase
from ninja.utils import check_csrf

from webapp.accounts.errors import Forbidden
from webapp.accounts.limits import check_project_rate, check_request_rate
from webapp.accounts.middleware import act_in_session
from webapp.accounts.permissions import admit, choose_project
from webapp.accounts.tokens import find_token_user

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


PROJECT_HEADER = "Headroom-Project"
"""Id or name of the project to work in: lists show it alone, and what is made goes there."""


class CsrfFailedError(Exception):
    """A session's unsafe request came without its CSRF token."""


class TokenOrSession(AuthBase):
    """Puts the user on ``request.user``; answers None (401) for nobody."""

    openapi_type = "http"
    openapi_scheme = "bearer"

    def __init__(self) -> None:
        super().__init__()
        self.openapi_security_schema["scheme"] = "bearer"

    def __call__(self, request: HttpRequest) -> Any:
        return authenticate(request)


class AsyncTokenOrSession(TokenOrSession):
    """The same for an async view, off the event loop."""

    async def __call__(self, request: HttpRequest) -> Any:
        return await sync_to_async(authenticate)(request)


def owner_of(request: HttpRequest) -> User:
    """The person behind an authenticated request."""
    return cast(User, request.user)


def authenticate(request: HttpRequest) -> Any:
    """The user, or None. Raises CsrfFailedError, and what the permission table raises: Forbidden, Http404."""
    authorization = request.headers.get("Authorization", "")
    if authorization:
        scheme, _, token = authorization.partition(" ")
        user = find_token_user(token.strip()) if scheme.lower() == "bearer" else None
        return _admitted(request, user) if user is not None else None
    if not request.user.is_authenticated:
        return None
    if request.method not in _SAFE_METHODS and check_csrf(request) is not None:
        raise CsrfFailedError
    act_in_session(request)
    return _admitted(request, request.user)


def _admitted(request: HttpRequest, user: Any) -> Any:
    request.user = user
    check_request_rate(user)
    try:
        if wanted := request.headers.get(PROJECT_HEADER, ""):
            choose_project(user, wanted)
        admit(request, user)
        if project_id := getattr(request, "audit_project_id", ""):
            check_project_rate(project_id)
    except Forbidden as error:
        request.was_refused = error.message  # type: ignore[attr-defined]
        raise
    return user
