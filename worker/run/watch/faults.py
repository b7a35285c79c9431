"""Counts the faults of this machine that jobs have met, by device, from the supervisor's side, and lets a sick device rest.

Each such job goes back to the queue, so that a slot which at once took the next one would go through the whole queue. Several
jobs in a row say that it is not one of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

logger = logging.getLogger(__name__)

HOST: Final = -1
"""Stands among the places of devices for what needs none of them."""
MAX_JOBS: Final = 3
"""Different jobs in a row that meet a fault before the device rests."""
REST_S: Final = 30.0
"""The first rest; each further one takes twice as long as the one before."""
MAX_REST_S: Final = 900.0


@dataclass(kw_only=True)
class _Record:
    """One device since the last attempt that ended well there."""

    job_ids: set[str] = field(default_factory=set)
    num_rests: int = 0
    until_s: float = float("-inf")


class FaultWatch:
    """The devices of one machine, for all of its slots."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}

    def note_fault(self, job_id: str, *, places: Sequence[int]) -> None:
        """An attempt of the job met a fault of the machine on these devices."""
        with self._lock:
            for place in places:
                record = self._records.setdefault(place, _Record())
                record.job_ids.add(job_id)
                # those that began before the rest say nothing of what comes after it
                if len(record.job_ids) >= MAX_JOBS and record.until_s <= self._now_s():
                    self._let_rest(record, place)

    def note_success(self, *, places: Sequence[int]) -> None:
        """An attempt on these devices ended well."""
        with self._lock:
            for place in places:
                self._records.pop(place, None)

    def resting(self) -> frozenset[int]:
        """Places on which nothing may begin now."""
        with self._lock:
            return frozenset(place for place, record in self._records.items() if self._now_s() < record.until_s)

    def _let_rest(self, record: _Record, place: int) -> None:
        rest_s = min(REST_S * 2 ** min(record.num_rests, 10), MAX_REST_S)
        record.num_rests += 1
        record.until_s = self._now_s() + rest_s
        where = "this machine" if place == HOST else f"device {place}"
        logger.warning(
            "%d jobs met a fault of the machine on %s, and none ended well since; it takes no job for %.0f s",
            len(record.job_ids), where, rest_s,
        )  # fmt: skip
