"""Announces to the broker that a job may be claimed. The message carries an id and no authority; losing it loses nothing."""

import logging
from functools import lru_cache

import kombu.exceptions
import redis.exceptions
from celery import Celery
from django.conf import settings

from webapp.wire.broker import RUN_JOB_TASK, celery_settings

logger = logging.getLogger(__name__)


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
