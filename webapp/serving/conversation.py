"""One ask, from the moment it is sent until its last event, whatever becomes of the process that answers it.

Before a supervisor has taken the ask, the job may end or be given to another worker: the ask waits, and a new job is started
where the old one is gone. Once it was taken, it is answered by that attempt or ends with an error; it is never sent twice.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import redis.exceptions
from django.conf import settings

from optimizer.base.errors import HeadroomError
from webapp.jobs.models import Job, State
from webapp.live.record import from_database
from webapp.serving.asking import AskedFor
from webapp.serving.holding import NobodyServes, ServerLost, hold, require_worker, waiting_words
from webapp.serving.names import Target
from webapp.serving.replies import Replies, replies_of_this_loop

LOOK_EVERY_S = 2.0
"""Without an answer for so long, one looks whether anybody is still there."""
MAX_WAIT_S = 300.0
"""For a model to come up, while the asker is sent comments."""
MAX_STARTS = 3
_REDIS_AWAY = (redis.exceptions.RedisError, OSError)

Event = dict[str, Any]


class Conversation:
    """One ask. ``begin``, then ``events`` to their end, then ``close``; a close before the end cancels the answer."""

    def __init__(self, user: Any, target: Target, asked: AskedFor) -> None:
        self._user = user
        self._target = target
        self._asked = asked
        self._id = uuid.uuid4().hex
        self._replies: Replies = replies_of_this_loop(settings.REDIS_URL)
        self._job: Job | None = None
        self._taken_by = ""
        self._num_starts = 0
        self._is_over = False
        self._misses = 0

    async def begin(self) -> None:
        """Raises what ``hold`` raises, and ServerLost where Redis is away."""
        self._queue = self._replies.open(self._id)
        await self._send()

    async def events(self) -> AsyncIterator[Event]:
        """``waiting`` with words, ``started``, ``delta``, and at last ``end`` or ``error``."""
        since_s = time.monotonic()
        while not self._is_over:
            try:
                # not wait_for: see Subscription.get in webapp/live/hub.py
                async with asyncio.timeout(LOOK_EVERY_S):
                    event = await self._queue.get()
            except TimeoutError:
                event = await self._look(waited_s=time.monotonic() - since_s)
            if event["type"] == "taken":
                self._taken_by = str(event["attempt"])
                continue
            self._misses = 0 if event["type"] != "waiting" else self._misses
            self._is_over = event["type"] in ("end", "error")
            yield event

    async def close(self) -> None:
        self._replies.close(self._id)
        if self._job is not None and not self._is_over:
            self._is_over = True
            with contextlib.suppress(*_REDIS_AWAY):  # its end is a number of tokens away
                await self._replies.send(self._job.pk, {"type": "cancel", "id": self._id})

    async def _send(self) -> None:
        self._num_starts += 1
        budget = self._asked.device_budget_bytes
        self._job = await from_database(lambda: hold(self._user, self._target, device_budget_bytes=budget))
        try:
            await self._replies.send(self._job.pk, self._message())
        except _REDIS_AWAY as error:
            raise ServerLost("the queue of asks is away", hint="Try again in a moment.") from error

    def _message(self) -> Event:
        asked = self._asked
        return {
            "type": "ask",
            "id": self._id,
            "adapter": self._target.adapter,
            "messages": asked.messages,
            "prompt": asked.prompt,
            "tools": asked.tools,
            "settings": asked.settings,
            "num_top": asked.num_top,
        }

    async def _look(self, *, waited_s: float) -> Event:
        """Find out why nothing comes."""
        assert self._job is not None
        job_id = self._job.pk
        job = await from_database(lambda: Job.objects.filter(pk=job_id).first())
        if self._taken_by:
            return await self._look_at_taken(job)
        if job is not None and not job.is_terminal and job.cancel_requested_at is None:
            self._job = job
            if waited_s > MAX_WAIT_S:
                return _error(f"{waiting_words(job)} for {waited_s:.0f} s; ask again later", code="not_ready")
            return await self._wait_on(job)
        return await self._start_again(job)

    async def _look_at_taken(self, job: Job | None) -> Event:
        is_there = job is not None and not job.is_terminal and str(job.attempt) == self._taken_by
        try:
            is_there = is_there and bool(await self._replies.alive_mark(self._job.pk if self._job else ""))
        except _REDIS_AWAY:
            is_there = False
        self._misses = 0 if is_there else self._misses + 1
        if self._misses < 2:  # its last words may be on their way
            return {"type": "waiting", "message": ""}
        return _error("the model's process ended in the middle of the answer; ask again", code="server_lost")

    async def _wait_on(self, job: Job) -> Event:
        if job.state == State.QUEUED:
            try:
                await from_database(require_worker)
            except NobodyServes as error:
                return _error(f"{error.message}. {error.hint}", code=error.code)
        return {"type": "waiting", "message": waiting_words(job)}

    async def _start_again(self, job: Job | None) -> Event:
        """The job ended before it took the ask: one that was let go for want of askers is started again."""
        if job is not None and job.state == State.FAILED:
            return _error(f"the model cannot be held: {job.message or job.reason}", code="server_failed")
        if job is not None and job.state == State.CANCELLED:
            return _error("the model was taken down; ask again", code="server_stopping")
        if self._num_starts >= MAX_STARTS:
            return _error("the model was let go before it could answer; ask again", code="server_lost")
        try:
            await self._send()
        except HeadroomError as error:
            return _error(error.message, code=error.code)
        return {"type": "waiting", "message": "the model is being started again"}


def _error(message: str, *, code: str) -> Event:
    return {"type": "error", "message": message, "code": code, "param": None}
