"""Every error of the API as ``application/problem+json`` (RFC 9457), with a stable ``code`` and the fields that were wrong."""

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from django.http import HttpResponse

from optimizer.base.errors import DiskFull, HeadroomError, InvalidInput, NoFeasiblePlan, PlanStale
from webapp.accounts.errors import Forbidden, LimitReached, SearchesBusy
from webapp.catalog.errors import CatalogConflict, ChecksBusy
from webapp.jobs.errors import JobConflict

CONTENT_TYPE = "application/problem+json"
MAX_FIELDS = 50
"""Wrong fields that one answer names."""


class StorageFailed(HeadroomError):
    """The disk, or the database's server, fails at reading or writing."""

    code = "storage_failed"
    retry_after_s = 30  # someone has to see to it


class DatabaseBusy(StorageFailed):
    """A lock or a connection was not to be had in the time that a request waits."""

    code = "database_busy"
    retry_after_s = 2


class DatabaseLost(StorageFailed):
    """The database's server is away, or ended the connection."""

    code = "database_unavailable"
    retry_after_s = 5


def problem(
    status: int,
    *,
    code: str,
    detail: str,
    title: str = "",
    fields: Sequence[dict[str, Any]] = (),
    hint: str = "",
    extra: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> HttpResponse:
    """``fields``: ``{"field", "value", "allowed", "message"}`` each."""
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": title or HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "fields": list(fields),
        "hint": hint,
    }
    if extra:
        document["extra"] = extra
    body = json.dumps(document, default=str)
    return HttpResponse(body, status=status, content_type=CONTENT_TYPE, headers=headers or {})


def problem_of(error: HeadroomError) -> HttpResponse:
    """An error of the program's own tree."""
    if isinstance(error, InvalidInput):
        field = {**error.fields, "message": error.message}
        return problem(422, code=error.code, detail=error.message, fields=[field], hint=error.hint)
    if isinstance(error, NoFeasiblePlan):
        return problem(422, code=error.code, detail=error.message, hint=error.hint, extra=error.fields)
    if isinstance(error, JobConflict | CatalogConflict | PlanStale):
        headers = {"Retry-After": "2"} if error.code == "profile_pending" else None
        return problem(409, code=error.code, detail=error.message, hint=error.hint, extra=error.fields, headers=headers)
    if isinstance(error, StorageFailed | ChecksBusy | SearchesBusy):
        headers = {"Retry-After": str(error.retry_after_s)}
        return problem(503, code=error.code, detail=error.message, hint=error.hint, headers=headers)
    if isinstance(error, LimitReached):
        headers = {"Retry-After": str(error.fields["retry_after_s"])}
        return problem(429, code=error.code, detail=error.message, hint=error.hint, extra=error.fields, headers=headers)
    status = 403 if isinstance(error, Forbidden) else 507 if isinstance(error, DiskFull) else 422
    return problem(status, code=error.code, detail=error.message, hint=error.hint, extra=error.fields)


def not_found() -> HttpResponse:
    """The same for what is not there and for what is someone else's."""
    hint = "Check the address, and which project you work in; a token of one project sees nothing else."
    return problem(404, code="not_found", detail="nothing with this id in your projects", hint=hint)


def unauthorized() -> HttpResponse:
    return problem(
        401,
        code="unauthorized",
        detail="this needs a valid API token or a session",
        hint="Send Authorization: Bearer hr_…; tokens are made on the page Tokens.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def csrf_failed() -> HttpResponse:
    return problem(
        403,
        code="csrf_failed",
        detail="the CSRF token is missing or wrong",
        hint="Send the csrftoken cookie's value as X-CSRFToken, or use an API token.",
    )


def field_problems(errors: Sequence[dict[str, Any]], *, sent: Any = None) -> list[dict[str, Any]]:
    """The first MAX_FIELDS of pydantic's findings, in our words; ``loc`` begins with where (body, query, …) and its name.

    sent: the parsed body; the wrong value is looked up in it, since the findings come without.
    """
    found = []
    for error in errors[:MAX_FIELDS]:
        place = [str(part) for part in error.get("loc", ())]
        path = place[2:] if place[:1] == ["body"] and len(place) > 2 else place[1:]
        found.append(
            {
                "field": ".".join(path or place),
                "value": _shown(_look_up(sent, path)),
                "allowed": {key: str(item) for key, item in (error.get("ctx") or {}).items()} or None,
                "message": str(error.get("msg", "")),
            }
        )
    return found


def _look_up(document: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(document, dict) or part not in document:
            return None
        document = document[part]
    return document


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return value[:200]
    return value if isinstance(value, int | float | None) else type(value).__name__
