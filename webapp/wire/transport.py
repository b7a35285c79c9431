"""The worker's way to the broker: a message that cannot be read is dropped, where Kombu would end the worker.

Whatever else writes to the same Redis, and whatever a broken client leaves in the queue, costs a line in the log.
"""

import logging
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis

logger = logging.getLogger(__name__)


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


def use_patient_transport() -> None:
    """From now on, brokers at ``redis://`` and ``redis+socket://`` are read by it in this process."""
    TRANSPORT_ALIASES["redis"] = f"{__name__}:{PatientTransport.__name__}"
