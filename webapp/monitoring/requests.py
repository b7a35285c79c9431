"""Counts requests and their time by route, and streams. Of a stream the time is that to its first byte.

Where several web processes serve together, they write into files of one folder, and each can show the sums.
"""

import time
from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from webapp.live.slots import VIEWERS
from webapp.processes import shares_metrics

Handler = Callable[[HttpRequest], HttpResponseBase]
AsyncHandler = Callable[[HttpRequest], Awaitable[HttpResponseBase]]

REGISTRY = CollectorRegistry(auto_describe=False)
"""This process's registry; not the library's own, which other packages write into."""
REGISTRY.register(VIEWERS)
REQUESTS = Counter(
    "headroom_http_requests", "Requests answered, by method, route and status.", ("method", "route", "status"), registry=REGISTRY
)
LATENCY = Histogram(
    "headroom_http_request_duration_seconds",
    "Time from a request to its answer, of a stream to its first byte.",
    ("method", "route"),
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
    registry=REGISTRY,
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def registry_of_all() -> CollectorRegistry:
    """The figures of all processes that serve together."""
    if not shares_metrics():
        return REGISTRY
    together = CollectorRegistry(auto_describe=False)
    MultiProcessCollector(together)  # type: ignore[no-untyped-call]
    return together


@sync_and_async_middleware
def count_requests(get_response: Handler | AsyncHandler) -> Handler | AsyncHandler:
    if iscoroutinefunction(get_response):

        async def handle_async(request: HttpRequest) -> HttpResponseBase:
            started_s = time.perf_counter()
            response = await cast(AsyncHandler, get_response)(request)
            _count(request, response, time.perf_counter() - started_s)
            return response

        return handle_async

    def handle(request: HttpRequest) -> HttpResponseBase:
        started_s = time.perf_counter()
        response = cast(Handler, get_response)(request)
        _count(request, response, time.perf_counter() - started_s)
        return response

    return handle


def _count(request: HttpRequest, response: HttpResponseBase, duration_s: float) -> None:
    """By the route as it is declared, never by what was sent: a stranger must not make labels."""
    match = request.resolver_match
    route = f"/{match.route}" if match is not None else "none"
    method = request.method if request.method in _METHODS else "other"
    REQUESTS.labels(method, route, str(response.status_code)).inc()
    LATENCY.labels(method, route).observe(duration_s)
