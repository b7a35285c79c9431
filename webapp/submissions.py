"""Bounds how many submissions are worked on at once, outside Django: a burst waits in line here, and past its length is refused.

Django gives each request a thread and a connection of its own. A hundred of them at once wait for each other's turns at the
interpreter and at SQLite's one writer, and all become slow; a few at once are done sooner, one after the other. What waits here
costs neither. A refusal is 503 with Retry-After, at once, with nothing read from the database.
"""

import asyncio
import json
import re
from collections.abc import MutableMapping
from typing import Any

from django.conf import settings

from webapp.body_guard import Application, Receive, Send

_SUBMISSIONS = re.compile(r"/api/v1/jobs(?:/cancel|/[^/]+/(?:cancel|pause|resume|retry|priority))?")
RETRY_AFTER_S = 1


class SubmissionLine:
    """ASGI middleware. Counted for each web process by itself."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._turns = asyncio.Semaphore(settings.HEADROOM_SUBMISSIONS_AT_ONCE)
        self._num_waiting = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        is_submission = scope["type"] == "http" and scope["method"] == "POST" and _SUBMISSIONS.fullmatch(scope["path"])
        if not is_submission:
            await self._application(scope, receive, send)
        elif self._turns.locked() and self._num_waiting >= settings.HEADROOM_SUBMISSIONS_WAITING:
            await _refuse(send)
        else:
            await self._take_turn(scope, receive, send)

    async def _take_turn(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._num_waiting -= 1
        try:
            await self._application(scope, receive, send)
        finally:
            self._turns.release()


async def _refuse(send: Send) -> None:
    document = {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": (
            f"{settings.HEADROOM_SUBMISSIONS_AT_ONCE} submissions are being taken and {settings.HEADROOM_SUBMISSIONS_WAITING} "
            "wait; allowed: no more at once"
        ),
        "code": "overloaded",
        "fields": [],
        "hint": "Nothing was done. Send it again after the seconds in Retry-After.",
    }
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
