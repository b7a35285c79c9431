"""One machine's part of an attempt that another machine leads, from its taking to its end: folder, process, lease.

Its process leads the part's ranks alone (``worker/run/ranks/part.py``). What people ask of the job, its telemetry and its verdict
are for the worker that leads. This one keeps the part's lease and ends its ranks when the attempt is over or another's; where it
is asked to stop itself, it has the attempt end at a checkpoint first. Where the worker that leads is halted, and its processes
have ended for that, this one gives the attempt back in its place.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from django.db import Error as DatabaseError
from django.db import connections

from webapp.attempts.outcome import finish_attempt
from webapp.jobs.devices.members import ask_to_drain, end_member, lose_member, renew_member
from webapp.jobs.models import Member
from worker.config import WorkerConfig
from worker.heartbeat import Heartbeat
from worker.run.brief import job_folder, write_brief_of_member
from worker.run.child import Child, DeviceLock, StopOrder, isolated_command
from worker.run.ranks.part import Part
from worker.run.reporter import read_json
from worker.run.watch.lifeline import Beats

logger = logging.getLogger(__name__)

TURN_S = 0.2
HALT_HEARD_S = 10.0
"""Time in which the leader of another machine has ended all of its ranks, of which one was seen to be gone."""
_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class MemberPlace:
    """The devices of a part."""

    devices: Sequence[str]
    """torch's names in the part's process."""
    cards: str | None
    """Cards that it may see, as ``CUDA_VISIBLE_DEVICES``; None: those that this process may."""
    lock: DeviceLock


def run_member(
    member: Member, *, config: WorkerConfig, place: MemberPlace, asked_s: float, draining: threading.Event
) -> None:
    """Carry one taken part through; whatever goes wrong here gives the part up, and with it the attempt.

    asked_s: when the part was asked for, by ``boot_s``; its lease has run since then.
    """
    run = _MemberRun(member, config=config, asked_s=asked_s, draining=draining)
    try:
        trouble = run.run(place)
    except DatabaseError:
        raise
    except Exception:
        logger.exception("%s ended by a fault of its worker", member)
        trouble = "a fault of its worker, whose log says more"
    _persist(lambda: lose_member(member, trouble) if trouble else end_member(member), limit_s=config.lease_s)
    logger.info("%s ended%s", member, f": {trouble}" if trouble else "")
    place.lock.release()
    if run.has_failed and (machine := run.wait_for_halted_leader()):
        loss, actor = f"the worker of {machine} was lost: it was halted", f"worker:{config.name}"
        # A worker that was halted within a write holds the rows until the database ends its transaction.
        _persist(
            lambda: finish_attempt(member.attempt, result=None, exit_code=None, actor=actor, loss=loss), limit_s=config.lease_s
        )
        logger.info("%s was ended in the place of its worker, which is halted", member.attempt)


class _MemberRun:
    def __init__(self, member: Member, *, config: WorkerConfig, asked_s: float, draining: threading.Event) -> None:
        self._member = member
        self._config = config
        self._draining = draining
        self._stop = StopOrder(grace_s=config.grace_s)
        self._asked_at_s: float | None = None
        self.has_failed = False
        """Its ranks ended by an error, mostly since they lost others."""
        self._heartbeat = Heartbeat(
            lambda: renew_member(member, lease_s=config.lease_s),
            asked_s=asked_s,
            lease_s=config.lease_s,
            interval_s=config.heartbeat_s,
            outage_s=config.outage_s,
        )

    def run(self, place: MemberPlace) -> str:
        """Why the part cannot go on, where that was not for the attempt's own leader to see; else empty."""
        folder = self._folder()
        write_brief_of_member(self._member, folder=folder, home=self._config.home, devices=place.devices)
        beats = Beats(self._heartbeat.work_until_s, interval_s=self._config.lease_s / 30)
        command = isolated_command("worker.run.runner", str(folder))
        child = None
        self._heartbeat.start()
        try:
            child = Child(command, folder=folder, lock=place.lock, cards=place.cards, beat_fd=beats.child_fd)
            beats.start()
            while not child.has_ended():
                self._stop.act(child, self._asked_to_stop(), is_fenced_out=self._heartbeat.is_fenced_out)
                time.sleep(TURN_S)
            exit_code, was_silent = child.reap(), beats.has_lapsed
        finally:
            if child is not None:
                child.close()
            beats.close()
            self._heartbeat.stop()
        if self._heartbeat.is_fenced_out or self._stop.is_asked or exit_code >= 0:
            self.has_failed = exit_code > 0
            return ""
        return "its worker was halted" if was_silent else f"its process was ended by signal {-exit_code}"

    def wait_for_halted_leader(self) -> str:
        """The name of the machine that leads, once its processes have ended because its worker is halted; empty where nothing is
        heard of that for some seconds.
        """
        part = Part.read(read_json(self._folder() / "attempt.json"), self._folder())
        until_s = time.monotonic() + HALT_HEARD_S
        while time.monotonic() < until_s and not self._draining.is_set():
            if (leads := part.machines[0]) in part.halted_machines():
                return leads
            time.sleep(TURN_S)
        return ""

    def _asked_to_stop(self) -> str:
        """``discard`` once the attempt's leader had its time to end the attempt at a checkpoint; else empty."""
        if not self._draining.is_set():
            return ""
        if self._asked_at_s is None:
            try:
                ask_to_drain(self._member)
            except DatabaseError as error:
                logger.warning("%s: its end is not asked for, will try again: %s", self._member, error)
                connections.close_all()
                return ""
            self._asked_at_s = time.monotonic()
        return "discard" if time.monotonic() - self._asked_at_s > self._config.grace_s else ""

    def _folder(self) -> Path:
        attempt = self._member.attempt
        return job_folder(self._config.home, attempt.job_id) / "attempts" / str(attempt.number) / "members" / str(self._member.pk)


def _persist(write: Callable[[], object], *, limit_s: float) -> None:
    """Try until it is written, or the lease has run out, which says the same."""
    give_up_at_s = time.monotonic() + limit_s
    while True:
        try:
            write()
            return
        except DatabaseError as error:
            if time.monotonic() > give_up_at_s:
                raise
            logger.warning("the end of a part is not written, will try again: %s", error)
            connections.close_all()
            time.sleep(_RETRY_S)
