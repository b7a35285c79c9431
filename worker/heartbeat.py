"""Renews an attempt's lease from its own thread, and hears on the way what people ask of the job.

A thread of its own, so that neither a slow write of telemetry nor a child that talks a lot can make a lease expire.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from django.db import Error as DatabaseError
from django.db import connections

from worker.run.watch.lifeline import boot_s

logger = logging.getLogger(__name__)

_SQLITE_LOCKED: Final = (5, 6)
"""SQLITE_BUSY and SQLITE_LOCKED, whose extended codes have them in the lowest byte."""
_POSTGRESQL_LOCKED: Final = ("40001", "40P01", "55P03", "57014")
"""No serial order, a deadlock, a lock that was not to be had, and a statement that took too long."""


class LeaseReply(Protocol):
    """The answer of ``webapp.attempts.records.renew_lease``."""

    @property
    def held(self) -> bool: ...
    @property
    def cancel_mode(self) -> str | None: ...
    @property
    def pause_requested(self) -> bool: ...
    @property
    def drains(self) -> bool: ...


class Heartbeat:
    """Beats until stopped. The fields are written by its thread and read by the attempt's loop."""

    def __init__(
        self, renew: Callable[[], LeaseReply], *, asked_s: float, lease_s: float, interval_s: float, outage_s: float
    ) -> None:
        """asked_s: when the claim that gave the lease was asked for, by ``boot_s``. The lease has run since then, and this
        process may have been halted meanwhile.
        """
        self._renew = renew
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._outage_s = outage_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._renewed_s = self._looked_s = asked_s
        self._woke_s = float("-inf")
        """When this process was last found to have been halted for a while, in which nobody asked the database."""
        self._is_away = False
        """The database did not answer the latest renewal that has ended, nor anybody else's, as far as can be known."""
        self.is_fenced_out = False
        """Another claim holds the job, or none could be heard of for too long: the attempt must end without a trace."""
        self.cancel_mode = ""
        self.pause_requested = False
        self.drains = False
        """The worker of another machine of the attempt was asked to stop."""

    def start(self) -> None:
        """Begin to beat: at once where the claim was asked for a while ago, since who was halted within it has no time left."""
        if boot_s() - self._renewed_s > self._interval_s:
            self.beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def beat(self) -> None:
        """One renewal. A database that cannot be reached is borne with for ``outage_s``, then the attempt gives up."""
        asked_s = boot_s()
        try:
            answer = self._renew()
        except DatabaseError as error:
            silent_s = boot_s() - self._renewed_s
            logger.warning("lease not renewed for %.0f s: %s", silent_s, error)
            self._is_away = not _is_contended(error)
            connections.close_all()
            self.is_fenced_out = self.is_fenced_out or silent_s > self._outage_s
            return
        self._renewed_s, self._is_away = asked_s, False
        self.cancel_mode = answer.cancel_mode or ""
        self.pause_requested = answer.pause_requested
        self.drains = answer.drains
        self.is_fenced_out = self.is_fenced_out or not answer.held

    def work_until_s(self) -> float:
        """The moment, by ``boot_s``, until which the attempt may work if nothing is heard of this process from now on.

        To be called many times in a lease.

        A tenth of the lease before its end. While the database is away nobody else can claim, so then a third of a lease from
        now, until that has gone on for ``outage_s``. Where a renewal waits for a lock, others may be let in first, expire the
        lease and claim; and who was halted does not know whether the database would have answered. Then the lease's end stands.
        """
        now_s = boot_s()
        if now_s - self._looked_s > self._lease_s / 3:
            self._woke_s = now_s
        self._looked_s = now_s
        silent_s = now_s - self._renewed_s
        if self.is_fenced_out or silent_s > max(self._outage_s, self._lease_s):
            return 0.0
        ends_s = self._renewed_s + 0.9 * self._lease_s
        may_go_on = self._is_away and self._woke_s <= self._renewed_s
        return max(ends_s, now_s + self._lease_s / 3) if may_go_on else ends_s

    def _run(self) -> None:
        try:
            while not self.is_fenced_out and not self._stopping.wait(self._interval_s):
                self.beat()
        finally:
            connections.close_all()


def _is_contended(error: DatabaseError) -> bool:
    """Report whether the database was there and others held what was needed, or it took too long."""
    cause = error.__cause__
    is_locked = getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_LOCKED
    return is_locked or getattr(cause, "sqlstate", None) in _POSTGRESQL_LOCKED
