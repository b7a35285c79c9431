"""Lets all requests for event streams share two threads, since a thread of its own, as Django gives each request, would live as
long as the stream: a thousand viewers would be a thousand threads, each with a connection to the database.

In these threads it is found out who asks; what a stream reads later is read in others (``record.py``).
"""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asgiref.sync import ThreadSensitiveContext

NUM_THREADS = 2
_STREAM = re.compile(r"/api/v1/jobs/[^/]+/events")


class SharedThreads:
    """ASGI middleware around Django, which keeps to the threads that are chosen outside it."""

    def __init__(self, application: Any) -> None:
        self._application = application
        threads = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="streams") for _ in range(NUM_THREADS)]
        self._threads = itertools.cycle(threads)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _STREAM.fullmatch(scope["path"]):
            await self._application(scope, receive, send)
            return
        async with ThreadSensitiveContext(executor=next(self._threads)):
            await self._application(scope, receive, send)
