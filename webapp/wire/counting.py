"""Counts what somebody does in a minute, over all web processes in Redis; in this process alone while Redis cannot be reached."""

import logging
import threading
import time
from functools import cache

import redis
from django.conf import settings

logger = logging.getLogger(__name__)

WINDOW_S = 60
_TIMEOUT_S = 0.2
_AGAIN_S = 30.0
"""After a failure Redis is left alone for so long: a request must not wait for it each time."""


def count_in_minute(name: str) -> int:
    """The number of calls with this name in the present minute, this one included."""
    return _counter(settings.REDIS_URL).count(name)


def seconds_left() -> int:
    """Until the next minute begins, at least 1."""
    return WINDOW_S - int(time.time()) % WINDOW_S


class _Counter:
    def __init__(self, redis_url: str) -> None:
        self._client = redis.Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._lock = threading.Lock()
        self._own: dict[str, int] = {}
        self._minute = 0
        self._not_before_s = 0.0

    def count(self, name: str) -> int:
        minute = int(time.time()) // WINDOW_S
        own = self._count_own(name, minute)
        if time.monotonic() < self._not_before_s:
            return own
        try:
            key = f"count:{name}:{minute}"
            with self._client.pipeline(transaction=False) as pipeline:
                pipeline.incr(key)
                pipeline.expire(key, 2 * WINDOW_S)
                counted, _ = pipeline.execute()
        except (redis.RedisError, OSError) as error:
            logger.warning("requests are counted in this process alone for %.0f s: %s", _AGAIN_S, error)
            self._not_before_s = time.monotonic() + _AGAIN_S
            return own
        return max(own, int(counted))

    def _count_own(self, name: str, minute: int) -> int:
        with self._lock:
            if minute != self._minute:
                self._minute, self._own = minute, {}
            self._own[name] = self._own.get(name, 0) + 1
            return self._own[name]


@cache
def _counter(redis_url: str) -> _Counter:
    return _Counter(redis_url)
