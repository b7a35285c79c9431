"""One client's stream of one job, as server-sent events.

The order: ``snapshot`` (``{"job", "metrics"}``), then the entries of the Redis stream with their ids. With ``Last-Event-ID``
the entries after it come at once, without a snapshot, if Redis still has that entry; otherwise ``reset`` and a snapshot. ``gap``
says that entries were lost on the way and the page should fetch the metrics. While Redis is away the same events come from the
database, once a second and without ids. ``done`` is the last event. A comment each 15 s keeps the line open.
"""

import asyncio
import contextlib
import copy
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import redis.exceptions
from django.conf import settings

from webapp.http.streaming import finish
from webapp.live.entries import Entry, encode_event, position_of
from webapp.live.hub import Hub, Signal, Subscription, hub_of_this_loop
from webapp.live.record import (
    Seen,
    done_document,
    ended_state,
    from_database,
    may_still_watch,
    read_news,
    read_snapshot,
)
from webapp.live.slots import Slot

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_S = 15.0
RECHECK_S = 60.0
POLL_S = 1.0
RETRY_MS = 3_000
_EVENT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
_REDIS_AWAY = (redis.exceptions.RedisError, OSError)


async def full_limit(user: Any, *, project_id: str) -> str:
    """Name of the limit that leaves no room for one more stream; empty where there is room."""
    return await Slot(user_id=user.pk, project_id=project_id).full_limit(hub_of_this_loop(settings.REDIS_URL))


async def job_events(user: Any, job_id: str, *, project_id: str = "", last_event_id: str = "") -> AsyncIterator[bytes]:
    """The bytes of the stream. Holds no database connection; ends after ``done`` or when the user may no longer watch.

    project_id: the job's, whose streams are limited too.
    """
    hub = hub_of_this_loop(settings.REDIS_URL)
    slot = Slot(user_id=user.pk, project_id=project_id)
    if await slot.take(hub):
        yield b"retry: 10000\n\n"
        return
    subscription = await hub.subscribe(job_id)
    try:
        yield f"retry: {RETRY_MS}\n\n".encode()
        watcher = _Watcher(user, job_id, hub=hub, subscription=subscription)
        async for event in watcher.events(last_event_id):
            yield event
            await slot.renew(hub)
    finally:
        await finish(_leave(hub, slot, subscription))


async def _leave(hub: Hub, slot: Slot, subscription: Subscription) -> None:
    # in this order: with its last subscriber the hub closes its connections to Redis
    await slot.give_back(hub)
    hub.unsubscribe(subscription)


class _Watcher:
    """The state of one stream."""

    def __init__(self, user: Any, job_id: str, *, hub: Hub, subscription: Subscription) -> None:
        self._user = user
        self._job_id = job_id
        self._hub = hub
        self._subscription = subscription
        self._seen = Seen()
        self._last_id = "0-0"
        self._is_ended = False
        self._checked_at_s = time.monotonic()

    async def events(self, last_event_id: str) -> AsyncIterator[bytes]:
        async for event in self._begin(last_event_id):
            yield event
        is_down = self._hub.is_down
        while not self._is_ended and await self._is_allowed():
            if is_down:
                async for event in self._poll():
                    yield event
            item = await self._subscription.get(POLL_S if is_down else HEARTBEAT_S)
            if item is None:
                if not is_down:
                    # also looks whether the end was missed: its entry may have been dropped
                    async for event in self._keep_alive():
                        yield event
            elif isinstance(item, Signal):
                is_down = item.kind == "down" or (is_down and item.kind != "up")
                async for event in self._signalled(item):
                    yield event
            elif (sent := self._entry(item)) is not None:
                yield sent

    async def _begin(self, last_event_id: str) -> AsyncIterator[bytes]:
        """Start the stream after the id that the client has, or with a snapshot and all that follows it."""
        try:
            # the position is taken before the database is read: an entry may then come twice, never not at all
            newest = await self._hub.last_id(self._job_id)
            await self._hub.watch_from(self._job_id, newest)
            can_resume = await self._can_resume(last_event_id)
            self._last_id = last_event_id if can_resume else newest
            missed = await self._hub.entries_after(self._job_id, last_event_id) if can_resume else []
        except _REDIS_AWAY as error:
            logger.info("stream of %s starts without Redis: %s", self._job_id, error)
            self._hub.is_down = True
            can_resume, missed = False, []
        if last_event_id and not can_resume and not self._hub.is_down:
            yield encode_event("reset", {})
        if not can_resume:
            async for event in self._snapshot():
                yield event
            return
        for entry in missed:
            if not self._is_ended and (sent := self._entry(entry)) is not None:
                yield sent
        await from_database(self._mark_seen)
        async for event in self._keep_alive():
            yield event

    async def _can_resume(self, last_event_id: str) -> bool:
        return bool(_EVENT_ID.fullmatch(last_event_id)) and await self._hub.has_entry(self._job_id, last_event_id)

    def _mark_seen(self) -> None:
        read_snapshot(self._job_id, self._seen)

    async def _snapshot(self) -> AsyncIterator[bytes]:
        shared = await _snapshot_of(self._job_id, after_id=self._last_id)
        own_id, self._last_id, self._seen = self._last_id, shared.after_id, copy.copy(shared.seen)
        yield shared.event
        if shared.is_ended:
            yield self._done(shared.seen.state)
        elif shared.after_id != own_id:
            # another client's: what came between its place in the stream and this one's
            with contextlib.suppress(*_REDIS_AWAY):  # which the hub will report
                for entry in await self._hub.entries_after(self._job_id, shared.after_id):
                    if not self._is_ended and (sent := self._entry(entry)) is not None:
                        yield sent

    async def _poll(self) -> AsyncIterator[bytes]:
        news = await from_database(lambda: read_news(self._job_id, self._seen))
        for kind, document in news.events:
            yield encode_event(kind, document)
        if news.is_ended and not self._is_ended:
            yield self._done(self._seen.state)

    async def _keep_alive(self) -> AsyncIterator[bytes]:
        yield b": keep-alive\n\n"
        state = await _end_of(self._job_id)
        if state is not None and not self._is_ended:
            yield encode_event("state", state)
            yield self._done(state)

    async def _signalled(self, signal: Signal) -> AsyncIterator[bytes]:
        if signal.kind == "overflow":
            yield encode_event("gap", {})
        elif signal.kind == "up":
            # what was published between the last poll and now is in the database soon, in the stream already
            async for event in self._poll():
                yield event
            try:
                for entry in await self._hub.entries_after(self._job_id, self._last_id):
                    if not self._is_ended and (sent := self._entry(entry)) is not None:
                        yield sent
                await self._hub.watch_from(self._job_id, self._last_id)
            except _REDIS_AWAY:
                return  # the hub will say ``down`` again
            yield encode_event("gap", {})

    def _entry(self, entry: Entry) -> bytes | None:
        """The entry's event; None for one that was sent already."""
        if entry.position <= position_of(self._last_id):
            return None
        self._last_id = entry.identifier
        if entry.kind == "done":
            self._is_ended = True
        elif entry.kind == "state":
            self._seen.state = entry.data
        return entry.event

    def _done(self, state: dict[str, Any]) -> bytes:
        self._is_ended = True
        return encode_event("done", done_document(state))

    async def _is_allowed(self) -> bool:
        if time.monotonic() - self._checked_at_s < RECHECK_S:
            return True
        self._checked_at_s = time.monotonic()
        return await from_database(lambda: may_still_watch(self._user, self._job_id))


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The snapshot that a stream begins with, whoever reads it."""

    after_id: str
    """Id of the newest entry before the database was read; the snapshot holds everything up to there."""
    event: bytes
    seen: Seen
    is_ended: bool


async def _snapshot_of(job_id: str, *, after_id: str) -> _Snapshot:
    """Those who come while one is being read share it: when a server starts again, hundreds come at once."""
    return await _shared(("snapshot", job_id), lambda: _read_snapshot(job_id, after_id))


async def _end_of(job_id: str) -> dict[str, Any] | None:
    """The state in which the job has ended, looked up a few seconds ago at most: each stream asks with every heartbeat."""
    return await _shared(("end", job_id), lambda: ended_state(job_id), keep_s=HEARTBEAT_S / 3)


async def _shared(key: tuple[str, str], read: Callable[[], T], *, keep_s: float = 0.0) -> T:
    """Read once for all who ask while it goes on, and for so long afterwards."""
    loop = asyncio.get_running_loop()
    reading = _reading.setdefault(loop, {})
    if key not in reading:
        reading[key] = asyncio.create_task(from_database(read))
        reading[key].add_done_callback(lambda _: loop.call_later(keep_s, reading.pop, key, None))
    # a client that leaves must not take the others' answer with it
    found: T = await asyncio.shield(reading[key])
    return found


_reading: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], asyncio.Task[Any]]]" = WeakKeyDictionary()


def _read_snapshot(job_id: str, after_id: str) -> _Snapshot:
    seen = Seen()
    document, is_ended = read_snapshot(job_id, seen)
    event = encode_event("snapshot", document, identifier=after_id if after_id != "0-0" else "")
    return _Snapshot(after_id=after_id, event=event, seen=seen, is_ended=is_ended)
