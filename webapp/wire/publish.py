"""Puts telemetry on the wire: one Redis stream per job, read by the pages that watch it.

The wire is not the record. A full or dead Redis costs the caller at most 50 ms, then the entry is dropped and counted, and for a
second nothing is tried at all. The first entry that gets through after that is preceded by a ``gap``, so that readers fetch what
they missed from the database; an attempt's supervisor says so by itself, since its next sample may be minutes away. Who publishes
what: ``state``, ``checkpoint`` and ``done`` are sent by ``webapp.jobs`` after each commit; ``sample`` and ``log`` by the worker.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

EntryType = Literal["sample", "state", "log", "checkpoint", "done", "gap"]

MAX_ENTRIES = 10_000
"""Kept per stream, about; older ones are in the database."""
_TIMEOUT_S = 0.05
_PAUSE_AFTER_FAILURE_S = 1.0
_EXPIRE_S = 24 * 3600
"""A finished job's stream goes after a day; the pages then read the database."""


def stream_key(job_id: str) -> str:
    return f"tele:job:{job_id}"


def publish(job_id: str, entry_type: EntryType, document: dict[str, Any]) -> bool:
    """Append ``document`` with its type; False when it was dropped."""
    return publish_all(job_id, entry_type, [document])


def publish_all(job_id: str, entry_type: EntryType, documents: Sequence[dict[str, Any]]) -> bool:
    """Append several, in this order and one round trip, or drop them all."""
    return _wire(settings.REDIS_URL).send(job_id, entry_type, documents)


def report_gap(job_id: str) -> bool:
    """Publish that something was dropped, where it was: for callers that may have nothing else to say for long."""
    return _wire(settings.REDIS_URL).report_gap(job_id)


def num_dropped() -> int:
    """Entries this process has dropped since it started."""
    return _wire(settings.REDIS_URL).num_dropped


class _Wire:
    """One connection pool to one Redis, and what is known about its health."""

    def __init__(self, redis_url: str) -> None:
        self._client = redis.Redis.from_url(
            redis_url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=None,
            max_connections=8,
        )
        self._lock = threading.Lock()
        self._silent_until_s = 0.0
        self._dropped_by_job: dict[str, int] = {}
        self.num_dropped = 0

    def send(self, job_id: str, entry_type: EntryType, documents: Sequence[dict[str, Any]]) -> bool:
        entries = [_entry(entry_type, document) for document in documents]
        return self._append(job_id, entries) or self._drop(job_id, len(entries))

    def report_gap(self, job_id: str) -> bool:
        return job_id in self._dropped_by_job and self._append(job_id, [])

    def _append(self, job_id: str, entries: list[Any]) -> bool:
        """After a gap, where there is one."""
        if time.monotonic() < self._silent_until_s:
            return False
        key = stream_key(job_id)
        num_missing = self._dropped_by_job.get(job_id, 0)
        gap = [_entry("gap", {"num_dropped": num_missing})] if num_missing else []
        try:
            # one round trip: expire is set with each entry, so an abandoned stream goes too
            pipeline = self._client.pipeline(transaction=False)
            for entry in (*gap, *entries):
                pipeline.xadd(key, entry, maxlen=MAX_ENTRIES, approximate=True)
            pipeline.expire(key, _EXPIRE_S)
            pipeline.execute()
        except (redis.RedisError, OSError) as error:
            self._silent_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
            logger.info("telemetry of %s dropped: %s", job_id, error)
            return False
        if num_missing:
            with self._lock:
                self._dropped_by_job.pop(job_id, None)
        return True

    def _drop(self, job_id: str, num_entries: int) -> bool:
        with self._lock:
            self.num_dropped += num_entries
            self._dropped_by_job[job_id] = self._dropped_by_job.get(job_id, 0) + num_entries
        return False


def _entry(entry_type: EntryType, document: dict[str, Any]) -> Any:
    return {"json": json.dumps({"type": entry_type, "data": document}, separators=(",", ":"))}


@lru_cache(maxsize=4)
def _wire(redis_url: str) -> _Wire:
    return _Wire(redis_url)
