"""Whatever error leaves an API address leaves it as problem+json, also one that Django itself made (400, 405, 413, …)."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from webapp.api.problems import CONTENT_TYPE, problem

Handler = Callable[[HttpRequest], HttpResponseBase]
AsyncHandler = Callable[[HttpRequest], Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def problem_middleware(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            return _as_problem(request, await cast(AsyncHandler, get_response)(request))

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        return _as_problem(request, cast(Handler, get_response)(request))

    return handle


def _as_problem(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    is_problem = response.headers.get("Content-Type", "").startswith(CONTENT_TYPE)
    if response.status_code < 400 or is_problem or not request.path.startswith("/api/"):
        return response
    status = HTTPStatus(response.status_code)
    allowed = response.headers.get("Allow", "")
    detail = status.description or status.phrase
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible here; allowed: {allowed}"
    code = status.phrase.lower().replace(" ", "_")
    return problem(status, code=code, detail=detail, headers={"Allow": allowed} if allowed else None)
