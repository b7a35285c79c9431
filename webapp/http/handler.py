"""Django's ASGI handler, which answers what is not asynchronous in one thread from end to end.

Django's own hands each request to its thread and back again for every middleware and every signal: some twenty times, which takes
longer than most answers. Here the whole chain of middleware and the view run in one call of the thread. Views that wait for
something (event streams, chats) and the files of the pages stay on the event loop.
"""

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.base import BaseHandler
from django.db import connection, connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, get_resolver, resolve

from webapp.accounts.turns import asked_by


class Handler(ASGIHandler):
    """Use one for each process, after ``django.setup()``."""

    def __init__(self) -> None:
        super().__init__()
        self._in_thread = BaseHandler()
        self._in_thread.load_middleware(is_async=False)
        _ = get_resolver().url_patterns  # imports every view now, and not on the event loop while the first request waits

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        path = request.path_info
        if path.startswith(settings.STATIC_URL):
            return await super().get_response_async(request)
        if not _is_asynchronous(path):
            return await sync_to_async(self._answer, thread_sensitive=True)(request)
        try:
            return await super().get_response_async(request)
        finally:
            await sync_to_async(connections.close_all, thread_sensitive=True)()  # a stream goes on for hours without it

    def _answer(self, request: HttpRequest) -> HttpResponseBase:
        with asked_by(lambda: request.user.pk):
            response = self._in_thread.get_response(request)
        # Django takes any connection to SQLite for sound, and would keep for the next request what has met a broken disk
        if connection.errors_occurred:
            connection.close()
        return response


def _is_asynchronous(path: str) -> bool:
    try:
        return iscoroutinefunction(resolve(path).func)
    except Resolver404:
        return False
