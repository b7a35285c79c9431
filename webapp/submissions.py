"""Bounds how many submissions are worked on at once, outside Django: a burst waits in line here, and past its length is refused.

Django gives each request a thread and a connection of its own. A hundred of them at once wait for each other's turns at the
interpreter and at SQLite's one writer, and all become slow; a few at once are done sooner, one after the other. What waits here
costs neither. A refusal is 503 with Retry-After, at once, with nothing read from the database.

Those who are refused together would come back together, and the last of them wait for the answers of all others. So each is given
a second in which few others come back; and while a burst is being refused no further submission begins, whose threads would take
the interpreter from the event loop at each of its calls of the system.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from django.conf import settings

from webapp.body_guard import Application, Receive, Send

_SUBMISSIONS = re.compile(r"/api/v1/jobs(?:/cancel|/[^/]+/(?:cancel|pause|resume|retry|priority))?")
MOST_BACK_PER_S = 64
"""Refused ones that are asked back in a second before any is asked back later: about as many as a process takes in one."""
LONGEST_WAIT_S = 4
"""The server closes a connection that is silent for 5 s; where more are refused, each second is given as many."""
BURST = 16
"""Refusals within ``BURST_S`` that are a burst."""
BURST_S = 0.1
"""No submission waits longer for the end of a burst."""
QUIET_S = 0.003
"""A burst has ended when nothing was refused for so long."""


class SubmissionLine:
    """ASGI middleware. Counted for each web process by itself."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._turns = asyncio.Semaphore(settings.HEADROOM_SUBMISSIONS_AT_ONCE)
        self._num_waiting = 0
        self._coming_back: Counter[int] = Counter()
        """Counts who was asked back, by the second of the loop's clock."""
        self._burst_began_s = self._refused_s = float("-inf")
        self._num_in_burst = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        is_submission = scope["type"] == "http" and scope["method"] == "POST" and _SUBMISSIONS.fullmatch(scope["path"])
        if not is_submission:
            await self._application(scope, receive, send)
        elif self._turns.locked() and self._num_waiting >= settings.HEADROOM_SUBMISSIONS_WAITING:
            await _refuse(send, retry_after_s=self._note_refusal())
        else:
            await self._take_turn(scope, receive, send)

    async def _take_turn(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._num_waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._num_waiting -= 1
        try:
            await self._let_burst_pass()
            await self._application(scope, receive, send)
        finally:
            self._turns.release()

    def _note_refusal(self) -> int:
        """Return in how many seconds to come back."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._burst_began_s > BURST_S:
            self._burst_began_s, self._num_in_burst = now_s, 0
        self._num_in_burst += 1
        self._refused_s = now_s
        for past in [second for second in self._coming_back if second < now_s - 1]:
            del self._coming_back[past]
        waits_s = range(1, LONGEST_WAIT_S + 1)
        num_back = {wait_s: self._coming_back[int(now_s) + wait_s] for wait_s in waits_s}
        emptiest = min(waits_s, key=lambda wait_s: num_back[wait_s])
        chosen = next((wait_s for wait_s in waits_s if num_back[wait_s] < MOST_BACK_PER_S), emptiest)
        self._coming_back[int(now_s) + chosen] += 1
        return chosen

    async def _let_burst_pass(self) -> None:
        clock = asyncio.get_running_loop().time
        until_s = clock() + BURST_S
        while self._num_in_burst >= BURST and clock() - self._refused_s < QUIET_S and clock() < until_s:
            await asyncio.sleep(QUIET_S)


async def _refuse(send: Send, *, retry_after_s: int) -> None:
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
        (b"retry-after", str(retry_after_s).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
