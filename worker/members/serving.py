"""Takes this machine's parts of attempts that other machines lead; each runs in a thread of its own.

Parts come with their devices, so they need no slot: the claim that made them has counted the room, on devices that nothing else
uses. A lock for each of them keeps a part from starting beside processes of another that a killed worker has left. *Not seen*:
those of a slot's job, whose lock is its slot's, since several jobs may use one device.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections

from webapp.catalog.models import Machine
from webapp.jobs.devices.members import lose_member, take_member
from webapp.jobs.models import Member
from worker.config import WorkerConfig
from worker.machine import device_lock_file, device_names, visible_cards
from worker.members.member import MemberPlace, run_member
from worker.run.child import DeviceLock
from worker.run.watch.lifeline import boot_s

logger = logging.getLogger(__name__)


class Members:
    """The parts that are at work here."""

    def __init__(self, config: WorkerConfig, *, draining: threading.Event, beside: Sequence[int] = ()) -> None:
        """beside: open files whose locks the processes of parts hold as well (``worker/run/watch/worker_lock.py``)."""
        self._config = config
        self._beside = beside
        self._draining = draining
        self._threads: list[threading.Thread] = []

    def serve(self, machine: Callable[[], Machine | None], *, rest: Callable[[], None]) -> None:
        """Until the worker drains and all parts have ended. machine: this one, while it is registered. rest: until there may be
        more."""
        try:
            while not self._draining.is_set():
                if not self._take(machine()):
                    rest()
        finally:
            connections.close_all()
            for thread in self._threads:
                thread.join()

    def _take(self, machine: Machine | None) -> bool:
        close_old_connections()
        asked_s = boot_s()
        try:
            member = machine and take_member(machine, worker=self._config.name, lease_s=self._config.lease_s)
        except DatabaseError as error:
            logger.warning("parts of jobs over several machines cannot be asked for, will try again: %s", error)
            connections.close_all()
            return False
        if member is None or machine is None:
            return False
        thread = threading.Thread(target=self._run, args=(member, machine, asked_s), name=f"member-{member.pk}", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()
        return True

    def _run(self, member: Member, machine: Machine, asked_s: float) -> None:
        lock = DeviceLock(*lock_files(member, machine, home=self._config.home), beside=self._beside)
        try:
            if not lock.acquire():
                lose_member(member, "processes of an earlier part are still there")
                return
            place = MemberPlace(
                devices=device_names(machine, member.devices),
                cards=visible_cards(machine, member.devices),
                lock=lock,
            )
            run_member(member, config=self._config, place=place, asked_s=asked_s, draining=self._draining)
        except (DatabaseError, OSError) as error:
            logger.warning("%s is given up, the database or the disk cannot be used: %s", member, error)
        finally:
            lock.release()
            connections.close_all()


def lock_files(member: Member, machine: Machine, *, home: Path) -> list[Path]:
    """One for each of the part's devices."""
    return [device_lock_file(machine, slot=f"member-{device}", home=home) for device in member.devices]
