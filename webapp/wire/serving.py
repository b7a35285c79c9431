"""Asks and answers of served models over Redis: names of the streams, and the supervisor's side of them.

Asks of one job wait in one stream, from which its supervisor takes them; an ask that nobody took yet survives both. Answers to
all who ask through one web process go to one stream of that process, with the ask's id on each. A key that runs out says whether
a supervisor is still there. Nothing here is a record: what is lost is asked again.
"""

import json
from collections.abc import Sequence
from typing import Any

import redis
from django.conf import settings

Document = dict[str, Any]

ASKS_KEPT_S = 600
"""An ask that nobody takes for so long has nobody who waits for it."""
ANSWERS_KEPT_S = 600
MAX_ANSWER_ENTRIES = 200_000
"""In the stream of one web process, about; a process that falls so far behind has lost its readers."""
ALIVE_S = 6
"""A supervisor marks itself every two seconds."""


def asks_key(job_id: str) -> str:
    return f"serve:asks:{job_id}"


def answers_key(listener: str) -> str:
    """listener: name of one web process's reader."""
    return f"serve:answers:{listener}"


def alive_key(job_id: str) -> str:
    return f"serve:alive:{job_id}"


def encode(document: Document) -> Any:
    return {"json": json.dumps(document, separators=(",", ":"))}


class SupervisorWire:
    """The worker's line; its calls block, and raise redis' errors."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        # Any: redis-py types the answers of its two protocols together, of which one is in use
        self._client: Any = redis.Redis.from_url(
            settings.REDIS_URL, socket_connect_timeout=2, socket_timeout=10, decode_responses=True
        )

    def take(self, *, block_ms: int, count: int = 64) -> list[Document]:
        """Asks and cancellations that have come, which are then gone from the stream."""
        key = asks_key(self._job_id)
        found = self._client.xread({key: "0-0"}, count=count, block=block_ms) or {}
        streams = found.items() if isinstance(found, dict) else found
        taken = []
        for _, entries in streams:
            # of two supervisors that read one entry, the one whose deletion counts has it
            flat = [entry for part in entries for entry in part] if entries and isinstance(entries[0], list) else entries
            for identifier, fields in flat:
                if self._client.xdel(key, identifier):
                    taken.append(json.loads(fields["json"]))
        return taken

    def reply(self, answers: Sequence[tuple[str, Document]]) -> None:
        """Send answers to their listeners, in order."""
        pipeline = self._client.pipeline(transaction=False)
        for listener, document in answers:
            pipeline.xadd(answers_key(listener), encode(document), maxlen=MAX_ANSWER_ENTRIES, approximate=True)
        for listener in {listener for listener, _ in answers}:
            pipeline.expire(answers_key(listener), ANSWERS_KEPT_S)
        pipeline.execute()

    def mark_alive(self, mark: str) -> None:
        """mark: which attempt it is."""
        self._client.set(alive_key(self._job_id), mark, ex=ALIVE_S)

    def unmark(self, mark: str) -> None:
        """Take the mark away, unless it is another attempt's by now."""
        if self._client.get(alive_key(self._job_id)) == mark:
            self._client.delete(alive_key(self._job_id))

    def close(self) -> None:
        self._client.close()
