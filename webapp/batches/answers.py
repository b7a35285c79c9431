"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from typing import Any, Final

from django.http import HttpResponse, JsonResponse

from optimizer.base.errors import DiskFull, HeadroomError, InvalidInput
from webapp.accounts.errors import Forbidden, LimitReached, SearchesBusy
from webapp.catalog.errors import ChecksBusy
from webapp.http.problems import StorageFailed
from webapp.jobs.errors import JobConflict

_STATUSES: Final = {
    Forbidden: 403,
    JobConflict: 409,
    LimitReached: 429,
    ChecksBusy: 503,
    SearchesBusy: 503,
    StorageFailed: 503,
    DiskFull: 507,
}


class RequestRefused(HeadroomError):
    """A request of this API that is not carried out."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.openai_code = code


def error_answer(
    status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> HttpResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    document: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JsonResponse(document, status=status, headers=headers or {})


def answer_of(error: HeadroomError) -> HttpResponse:
    """An error of the program's own tree."""
    if isinstance(error, RequestRefused):
        return error_answer(error.status, error.message, param=error.param, code=error.openai_code)
    message = f"{error.message}. {error.hint}".rstrip(". ") if error.hint else error.message
    if isinstance(error, InvalidInput):
        return error_answer(400, message, param=str(error.fields.get("field") or "") or None, code=error.code)
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
    retry_after_s = error.fields.get("retry_after_s", getattr(error, "retry_after_s", None))
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return error_answer(status, message, code=error.code, headers=headers)


def not_found(what: str) -> HttpResponse:
    """The same for what is not there and for what is someone else's."""
    return error_answer(404, f"no such {what}", code="not_found")


def unauthorized() -> HttpResponse:
    return error_answer(
        401,
        "this needs a valid API token: Authorization: Bearer hr_…; tokens are made on the page Tokens",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
