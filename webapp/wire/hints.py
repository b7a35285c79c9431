"""Announces to the broker that a job may be claimed. The message carries an id and no authority; losing it loses nothing."""

import logging
import threading
import time
from functools import lru_cache

import kombu.exceptions
import redis.exceptions
from celery import Celery
from django.conf import settings

from webapp.wire.broker import RUN_JOB_TASK, celery_settings

logger = logging.getLogger(__name__)


GAP_S = 0.05
"""Hints of one process are as far apart: each wakes all idle workers, so many at once say no more than the last of them."""


class _Bell:
    """The first hint is sent at once, and of those that come within the gap after it one, at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_s = float("-inf")
        self._next: threading.Timer | None = None

    def ring(self, job_id: str) -> bool:
        with self._lock:
            if self._next is not None:
                return True
            wait_s = self._sent_s + GAP_S - time.monotonic()
            if wait_s > 0:
                self._next = threading.Timer(wait_s, self._ring_late, [job_id])
                self._next.daemon = True
                self._next.start()
                return True
            self._sent_s = time.monotonic()
        return send_hint(job_id)

    def _ring_late(self, job_id: str) -> None:
        with self._lock:
            self._next = None
            self._sent_s = time.monotonic()
        send_hint(job_id)


_bell = _Bell()


def hint_soon(job_id: str) -> bool:
    """Wake idle workers now, or in a moment where they were just woken. False when the broker did not take it."""
    return _bell.ring(job_id)


def send_hint(job_id: str) -> bool:
    """True when the broker took it. A failure is logged and swallowed: the reconciler sends again, idle workers poll."""
    try:
        _producer(settings.REDIS_URL).send_task(RUN_JOB_TASK, [job_id], retry=False)
    except (kombu.exceptions.OperationalError, redis.exceptions.RedisError, OSError) as error:
        logger.warning("hint for %s not sent, the reconciler will: %s", job_id, error)
        return False
    return True


@lru_cache(maxsize=4)
def _producer(redis_url: str) -> Celery:
    app = Celery("headroom-hints", set_as_current=False)
    app.conf.update(celery_settings(redis_url))
    # a sender must not wait for a broker that is down
    app.conf.broker_connection_timeout = 1
    app.conf.broker_connection_max_retries = 0
    app.conf.broker_transport_options = {
        **app.conf.broker_transport_options,
        "socket_connect_timeout": 0.5,
        "socket_timeout": 1,
        "max_retries": 1,
        "interval_start": 0,
        "interval_step": 0,
        "interval_max": 0,
    }
    return app
