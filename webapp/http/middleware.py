"""Whatever error leaves an API address leaves it as problem+json, also one that Django itself made (400, 405, 413, …).

An address that holds a NUL is refused here, for pages too: no row has one, and PostgreSQL fails on the question.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponseBadRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from webapp.http.problems import CONTENT_TYPE, problem

Handler = Callable[[HttpRequest], HttpResponseBase]
AsyncHandler = Callable[[HttpRequest], Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def problem_middleware(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            refused = _refuse_nul(request)
            return _as_problem(request, refused or await cast(AsyncHandler, get_response)(request))

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        return _as_problem(request, _refuse_nul(request) or cast(Handler, get_response)(request))

    return handle


def _refuse_nul(request: HttpRequest) -> HttpResponseBase | None:
    if "\0" in request.path or "\0" in unquote(request.META.get("QUERY_STRING", "")):
        return HttpResponseBadRequest("the address holds a NUL character\n", content_type="text/plain")
    return None


def _as_problem(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    is_problem = response.headers.get("Content-Type", "").startswith(CONTENT_TYPE)
    if response.status_code < 400 or is_problem or not request.path.startswith("/api/"):
        return response
    status = HTTPStatus(response.status_code)
    allowed = response.headers.get("Allow", "")
    detail = status.description or status.phrase
    if isinstance(response, HttpResponseBadRequest) and response.headers.get("Content-Type") == "text/plain":
        detail = response.content.decode().strip()
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible here; allowed: {allowed}"
    code = status.phrase.lower().replace(" ", "_")
    return problem(status, code=code, detail=detail, headers={"Allow": allowed} if allowed else None)
