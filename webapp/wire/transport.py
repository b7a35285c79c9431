"""The worker's way to the broker, where Kombu and Celery alone would end the worker.

A message that cannot be read is dropped: whatever else writes to the same Redis, and whatever a broken client leaves in the
queue, costs a line in the log. A connection that the broker cannot serve is closed before the next is tried.
"""

import logging
import time
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

logger = logging.getLogger(__name__)

_PAUSE_AFTER_REFUSAL_S = 1.0
"""Celery tries again at once, many times a second, and writes three lines each time."""


class PatientChannel(redis.Channel):
    """Reads hints as Kombu's own channel does."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # The message is off the queue by now, and without it nothing is lost: hints come again.
            logger.warning("a message of the broker cannot be read and is dropped: %s: %s", type(error).__name__, error)
            raise Empty from None


class PatientTransport(redis.Transport):
    Channel = PatientChannel

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Close the connection where the broker refuses what Kombu writes to it, as one without memory does.

        Celery (5.7.0, ``Consumer.connect``) would forget it without closing it: two sockets with each try, until no file can be
        opened.
        """
        try:
            super().register_with_event_loop(connection, loop)  # type: ignore[no-untyped-call]
        except Exception:
            self.close_connection(connection)  # type: ignore[no-untyped-call]
            time.sleep(_PAUSE_AFTER_REFUSAL_S)
            raise


def use_patient_transport() -> None:
    """From now on, brokers at ``redis://`` and ``redis+socket://`` are read by it in this process."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:{PatientTransport.__name__}"
