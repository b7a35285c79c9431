"""One reader of answers for all that this process waits for: a stream of its own, sorted by the ask's id into queues.

Belongs to one event loop. While Redis is away every open ask ends with an error: what came meanwhile is lost, and an answer with
a hole in it is worse than none.
"""

import asyncio
import json
import logging
import uuid
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio
import redis.exceptions

from webapp.wire.serving import ASKS_KEPT_S, alive_key, answers_key, asks_key, encode

logger = logging.getLogger(__name__)

_BLOCK_MS = 1000
_BATCH = 500
_LOST: dict[str, Any] = {
    "type": "error",
    "code": "server_lost",
    "message": "the line to the model's process was cut; ask again",
    "param": None,
}

Document = dict[str, Any]


class Replies:
    """Use ``replies_of_this_loop``."""

    def __init__(self, redis_url: str) -> None:
        # Any: redis-py types the answers of its two protocols together, of which one is in use
        self._redis: Any = redis.asyncio.Redis.from_url(
            redis_url, decode_responses=True, socket_connect_timeout=2, socket_timeout=10, retry=None
        )
        self.listener = uuid.uuid4().hex
        self._queues: dict[str, asyncio.Queue[Document]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._position = "0-0"

    def open(self, ask_id: str) -> "asyncio.Queue[Document]":
        """The queue of an ask's answers, to be closed again."""
        queue = self._queues[ask_id] = asyncio.Queue()
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_on(), name="serving-replies")
        return queue

    def close(self, ask_id: str) -> None:
        self._queues.pop(ask_id, None)

    async def send(self, job_id: str, document: Document) -> None:
        """Put an ask or a cancellation before the job's supervisor. Raises redis' errors."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.xadd(asks_key(job_id), encode({**document, "listener": self.listener}))
        pipeline.expire(asks_key(job_id), ASKS_KEPT_S)
        await pipeline.execute()

    async def alive_mark(self, job_id: str) -> str:
        """The attempt whose supervisor is there; empty where none is. Raises redis' errors."""
        return str(await self._redis.get(alive_key(job_id)) or "")

    async def _read_on(self) -> None:
        """Ends when nobody waits any more; the next ask starts it again."""
        key = answers_key(self.listener)
        while self._queues:
            try:
                found = await self._redis.xread({key: self._position}, count=_BATCH, block=_BLOCK_MS) or {}
            except (redis.exceptions.RedisError, OSError) as error:
                logger.warning("answers of served models cannot be read: %s", error)
                self._fail_all()
                return
            for identifier, fields in _entries(found):
                self._position = str(identifier)
                document = json.loads(fields["json"])
                if (queue := self._queues.get(document.get("id"))) is not None:
                    queue.put_nowait(document)

    def _fail_all(self) -> None:
        for ask_id, queue in self._queues.items():
            queue.put_nowait({**_LOST, "id": ask_id})


def _entries(found: Any) -> list[Any]:
    """Entries of one stream, whichever protocol wrote it: RESP3 nests a list more."""
    streams = found.items() if isinstance(found, dict) else found
    entries = [entry for _, per_stream in streams for entry in per_stream]
    return [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]


_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Replies]]" = WeakKeyDictionary()


def replies_of_this_loop(redis_url: str) -> Replies:
    by_url = _by_loop.setdefault(asyncio.get_running_loop(), {})
    if redis_url not in by_url:
        by_url[redis_url] = Replies(redis_url)
    return by_url[redis_url]
