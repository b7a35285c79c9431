"""One reader of Redis for all the streams that this process's clients watch; each client has its own bounded queue.

A thousand clients cost one blocking read. A client that does not keep up loses its queue and is notified; the reader never
waits for anyone. While Redis is away each client is sent ``down`` once, and ``up`` when it is back. The hub belongs to
one event loop.
"""

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio
import redis.exceptions

from webapp.live.entries import Entry, read_entry
from webapp.wire.publish import stream_key

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 100
MAX_CONNECTIONS = 16
"""Clients that come at once wait for one another: a connection each, and some would time out as if Redis were away."""
_BLOCK_MS = 500
"""Longest wait of a read; a newly watched stream joins the next read."""
_BATCH = 200
_RECONNECT_S = 1.0


@dataclass(frozen=True)
class Signal:
    """Signals that a queue holds beside entries."""

    kind: str
    """``down``, ``up`` or ``overflow``."""


class Subscription:
    """One client's queue of one job's entries."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self._queue: asyncio.Queue[Entry | Signal] = asyncio.Queue()

    async def get(self, timeout_s: float) -> Entry | Signal | None:
        """None when nothing came in time."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            # not wait_for: before Python 3.12 it swallows a cancellation that meets an item (cpython #86296)
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    def put(self, item: Entry | Signal) -> None:
        """Over the limit the whole queue is dropped for one ``overflow``: a late client needs the newest, not the oldest."""
        if self._queue.qsize() >= QUEUE_LIMIT and not isinstance(item, Signal):
            while not self._queue.empty():
                self._queue.get_nowait()
            self._queue.put_nowait(Signal("overflow"))
        self._queue.put_nowait(item)


class Hub:
    """Use ``hub_of_this_loop``; one per event loop and Redis."""

    def __init__(self, redis_url: str) -> None:
        # Any: redis-py types the answers of its two protocols together, of which one is in use
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=10,
            decode_responses=True,
            socket_connect_timeout=1,
            socket_timeout=10,
            retry=None,
        )
        self._redis: Any = redis.asyncio.Redis.from_pool(pool)  # whose connections end with it
        self._subscribers: dict[str, set[Subscription]] = defaultdict(set)
        self._positions: dict[str, str] = {}
        self._reader: asyncio.Task[None] | None = None
        self.is_down = False

    async def subscribe(self, job_id: str) -> Subscription:
        """Entries after this moment. Raises redis' errors while Redis is away, with the subscription made all the same."""
        subscription = Subscription(job_id)
        self._subscribers[job_id].add(subscription)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_for_ever(), name="live-hub")
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        watchers = self._subscribers.get(subscription.job_id)
        if watchers is None:
            return
        watchers.discard(subscription)
        if not watchers:
            del self._subscribers[subscription.job_id]
            self._positions.pop(subscription.job_id, None)

    async def last_id(self, job_id: str) -> str:
        """Id of the newest entry; ``0-0`` for an empty stream."""
        newest = await self._redis.xrevrange(stream_key(job_id), count=1)
        return str(newest[0][0]) if newest else "0-0"

    async def watch_from(self, job_id: str, entry_id: str) -> None:
        """Start the common reader of this stream after ``entry_id``, unless it runs already."""
        self._positions.setdefault(job_id, entry_id)

    async def has_entry(self, job_id: str, entry_id: str) -> bool:
        return bool(await self._redis.xrange(stream_key(job_id), min=entry_id, max=entry_id, count=1))

    async def evaluate(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        """Run a script in Redis and return its answer."""
        return await self._redis.eval(script, len(keys), *keys, *arguments)

    async def entries_after(self, job_id: str, entry_id: str) -> list[Entry]:
        """Everything after ``entry_id``, which may be some thousands."""
        found = await self._redis.xrange(stream_key(job_id), min=f"({entry_id}")
        return [read_entry(str(identifier), str(fields.get("json", ""))) for identifier, fields in found]

    async def _read_for_ever(self) -> None:
        """Ends when nobody watches any more; the next subscriber starts it again."""
        try:
            while self._subscribers:
                try:
                    await self._read_once()
                    self._tell(is_down=False)
                except (redis.exceptions.RedisError, OSError) as error:
                    if not self.is_down:
                        logger.warning("Redis is away, pages are served from the database: %s", error)
                    self._tell(is_down=True)
                    await asyncio.sleep(_RECONNECT_S)
                if not self._subscribers:
                    # inside the loop: someone may subscribe while it waits, and then relies on this reader
                    await self._redis.connection_pool.disconnect(inuse_connections=False)
        except asyncio.CancelledError:
            await self._redis.aclose()
            raise

    async def _read_once(self) -> None:
        watched: dict[Any, Any] = {stream_key(job_id): position for job_id, position in self._positions.items()}
        if not watched:
            await self._redis.ping()
            await asyncio.sleep(0.05)
            return
        for key, entries in await self._redis.xread(watched, count=_BATCH, block=_BLOCK_MS) or []:
            job_id = str(key).removeprefix(stream_key(""))
            for identifier, fields in entries:
                if job_id in self._positions:
                    self._positions[job_id] = str(identifier)
                entry = read_entry(str(identifier), str(fields.get("json", "")))
                for subscription in self._subscribers.get(job_id, ()):
                    subscription.put(entry)

    def _tell(self, *, is_down: bool) -> None:
        if self.is_down == is_down:
            return
        self.is_down = is_down
        for watchers in self._subscribers.values():
            for subscription in watchers:
                subscription.put(Signal("down" if is_down else "up"))


_hubs: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Hub]]" = WeakKeyDictionary()


def hub_of_this_loop(redis_url: str) -> Hub:
    by_url = _hubs.setdefault(asyncio.get_running_loop(), {})
    if redis_url not in by_url:
        by_url[redis_url] = Hub(redis_url)
    return by_url[redis_url]
