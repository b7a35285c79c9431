"""Headers of every answer but those of static files: nothing about anybody is kept in a cache, no device is asked for."""

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

Handler = Callable[[HttpRequest], HttpResponseBase]
AsyncHandler = Callable[[HttpRequest], Awaitable[HttpResponseBase]]

_CLOSED = ("camera", "display-capture", "geolocation", "microphone", "midi", "payment", "usb")
PERMISSIONS_POLICY = ", ".join(f"{feature}=()" for feature in _CLOSED)
"""The pages use none of these. Only features that all browsers know: an unknown one is a complaint in the console."""


@sync_and_async_middleware
def guard_answers(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            return _guarded(await cast(AsyncHandler, get_response)(request))

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        return _guarded(cast(Handler, get_response)(request))

    return handle


def _guarded(response: HttpResponseBase) -> HttpResponseBase:
    response.headers.setdefault("Permissions-Policy", PERMISSIONS_POLICY)
    # with an ETag a copy may be kept if it is asked about each time; shared caches keep neither
    response.headers.setdefault("Cache-Control", "private, no-cache" if "ETag" in response.headers else "no-store")
    return response
