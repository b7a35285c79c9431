"""Chooses the thread in which a request is worked on.

All requests for event streams share two threads, since a thread of its own, as Django gives each request, would live as long as
the stream: a thousand viewers would be a thousand threads, each with a connection to the database. In these threads it is found
out who asks; what a stream reads later is read in others (``record.py``).

Every other request has a thread to itself, which is kept for the next one: starting a thread and opening SQLite's file each time
would take as long as a short answer.
"""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asgiref.sync import ThreadSensitiveContext
from django.db import connections

NUM_THREADS = 2
MAX_IDLE = 8
"""Threads that wait for a request; more are started where more come at once, and end afterwards."""
_STREAM = re.compile(r"/api/v1/jobs/[^/]+/events")


class ChosenThreads:
    """ASGI middleware around Django, which keeps to the threads that are chosen outside it."""

    def __init__(self, application: Any) -> None:
        self._application = application
        threads = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="streams") for _ in range(NUM_THREADS)]
        self._shared = itertools.cycle(threads)
        self._idle: list[ThreadPoolExecutor] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
        elif _STREAM.fullmatch(scope["path"]):
            async with ThreadSensitiveContext(executor=next(self._shared)):
                await self._application(scope, receive, send)
        else:
            await self._answer_alone(scope, receive, send)

    async def _answer_alone(self, scope: Any, receive: Any, send: Any) -> None:
        thread = self._idle.pop() if self._idle else ThreadPoolExecutor(max_workers=1, thread_name_prefix="request")
        is_idle = False
        try:
            async with ThreadSensitiveContext(executor=thread):
                await self._application(scope, receive, send)
            # Django's last signal runs in the thread, so nothing of the request is left in it; after an error there may be
            is_idle = True
        finally:
            if is_idle and len(self._idle) < MAX_IDLE:
                self._idle.append(thread)
            else:
                thread.submit(connections.close_all)
                thread.shutdown(wait=False)
