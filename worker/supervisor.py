"""Lives in the Celery worker's main process: registers the machine, claims jobs, runs one attempt per slot, drains.

Each slot is a thread: take the slot's lock, claim, run the attempt's process to its end, again. Threads, because a slot only
waits and writes rows; whatever computes is in the attempt's own process, and this one never imports torch.

Profiling and exporting have slots of their own that leave the device alone, so that a new model can be priced, and what was saved
be written out, while a long job runs. Parts of jobs that other machines lead are taken beside the slots (``members/``), and links
to other machines are measured there (``links/``).
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections

from optimizer.base.errors import MachineFault
from webapp.attempts.claiming import claim_job
from webapp.attempts.reconciling import give_back_all_of
from webapp.catalog.actions import heartbeat_machine
from webapp.catalog.models import Machine
from webapp.jobs.devices.joined import is_joined
from webapp.jobs.devices.room import count_devices
from webapp.jobs.models import DEVICE_JOB_KINDS, PROBED, Attempt, Kind
from worker.alive import mark_alive
from worker.attempt import AttemptPlace, run_attempt
from worker.config import WorkerConfig
from worker.gpu import GpuMeter
from worker.links.serving import Links
from worker.machine import (
    count_slots,
    device_lock_file,
    device_meters,
    device_names,
    host_lock_file,
    read_used_bytes,
    register_this_machine,
    visible_cards,
)
from worker.members.serving import Members
from worker.run.child import DeviceLock
from worker.run.watch.faults import HOST, FaultWatch
from worker.run.watch.lifeline import boot_s
from worker.run.watch.worker_lock import WorkerLock, gone_workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one attempt at a time."""

    name: str
    kinds: tuple[Kind, ...] = DEVICE_JOB_KINDS
    """Kinds of job that it takes."""
    uses_device: bool = True
    """False: its attempts work on the host alone, and see no device."""


PROFILING_SLOT = Slot(name="profiling", kinds=(Kind.PROFILE,), uses_device=False)
HASTY_S = 10.0
HASTY_POLL_S = 0.5
MEMBER_POLL_S = 1.0
"""Between two looks for parts of jobs that other machines lead, each of which is one short query."""
ENDED_WELL = ("succeeded", "drained", "paused", PROBED)
"""Answers of ``finish_attempt`` after which a device is known to work."""
EXPORTING_SLOT = Slot(name="exporting", kinds=(Kind.EXPORT,), uses_device=False)


class Supervisor:
    """Start it once per process; ``drain`` then ``join`` end it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._draining = threading.Event()
        self._hint = threading.Event()
        self._registered = threading.Event()
        self._machine: Machine | None = None
        self._cards: list[GpuMeter] = []
        self._looking = threading.Lock()
        """Held by the slot that looks for a job: those of one machine do so one after the other."""
        self._num_devices_used = 0
        """Counted once for each attempt that uses a device."""
        self._faults = FaultWatch()
        self._hasty_until_s = float("-inf")
        """Until then slots look often: a job over several machines has ended, which can go on once all have left it."""
        self._own_lock = WorkerLock(config.home, worker=config.name)
        self._num_slots = config.num_slots
        slots = (*(Slot(name=str(index)) for index in range(config.num_slots)), PROFILING_SLOT, EXPORTING_SLOT)
        machine = threading.Thread(target=self._keep_machine, name="machine", daemon=True)
        members = threading.Thread(target=self._serve_members, name="members", daemon=True)
        links = threading.Thread(target=self._serve_links, name="links", daemon=True)
        self._threads = [machine, members, links, *(self._thread_of(slot) for slot in slots)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _thread_of(self, slot: Slot) -> threading.Thread:
        return threading.Thread(target=self._serve, args=(slot,), name=f"slot-{slot.name}", daemon=True)

    def wake(self) -> None:
        """Something may be claimable: look now and not at the next poll."""
        self._hint.set()

    def drain(self) -> None:
        """Claim nothing more; running attempts checkpoint and go back to the queue. Safe in a signal handler."""
        if self._draining.is_set():
            return  # a second signal must not meet the first inside the event's lock
        self._draining.set()
        self._hint.set()
        self._registered.set()

    def join(self) -> None:
        for thread in self._threads:  # the machine's is the first, and the only one that adds to them
            thread.join()

    def _keep_machine(self) -> None:
        """Register the machine, however long the database takes to answer, then show every few seconds that it is there."""
        try:
            while not self._draining.is_set():
                try:
                    self._register_or_touch()
                    pause_s = min(5.0, self._config.heartbeat_s)
                except (DatabaseError, OSError) as error:  # a full disk too passes
                    logger.warning("this machine is not registered yet, will try again: %s", error)
                    connections.close_all()
                    pause_s = self._config.poll_s
                self._draining.wait(pause_s)
        except Exception:
            logger.exception("this machine could not be measured; the worker runs no jobs until it is started again")
        finally:
            self._say_that_it_drains()
            connections.close_all()

    def _say_that_it_drains(self) -> None:
        """So that no part of a job over several machines is given to this one any more."""
        try:
            if self._machine is not None:
                heartbeat_machine(self._machine, draining=True)
        except DatabaseError as error:
            logger.warning("that this machine takes no more jobs is not written: %s", error)

    def _register_or_touch(self) -> None:
        self._own_lock.begin()
        self._give_back_for_gone_workers()
        if self._machine is None:
            self._machine = register_this_machine(self._config)
            self._cards = device_meters(self._machine)
            self._add_slots(count_slots(self._machine, self._config))
            self._registered.set()
        elif not heartbeat_machine(self._machine, used_bytes=self._used_bytes()):
            self._machine = None  # somebody removed the row; the next turn makes it again
        mark_alive(self._config.home, worker=self._config.host)

    def _give_back_for_gone_workers(self) -> None:
        """Mostly for the one in whose place this process was started; nobody has to wait for its leases to end."""
        for worker in gone_workers(self._config.home, host=self._config.host):
            for job_id in give_back_all_of(worker, actor=f"worker:{self._config.name}"):
                logger.info("%s: given back for %s, which is gone with all of its processes", job_id, worker)
                self._be_hasty()

    def _add_slots(self, num_slots: int) -> None:
        """Slots for the devices beyond the first, once it is known how many there are."""
        added = [self._thread_of(Slot(name=str(index))) for index in range(self._num_slots, num_slots)]
        self._num_slots = max(self._num_slots, num_slots)
        for thread in added:
            thread.start()
        self._threads += added

    def _used_bytes(self) -> list[int]:
        return [] if self._machine is None else read_used_bytes(
            self._machine, self._cards, resting=self._faults.resting()
        )

    def _serve_members(self) -> None:
        self._registered.wait()
        members = Members(self._config, draining=self._draining, beside=self._own_lock.fds)
        members.serve(lambda: self._machine, rest=self._rest_between_parts)

    def _serve_links(self) -> None:
        self._registered.wait()
        Links(self._config, draining=self._draining).serve(lambda: self._machine)

    def _serve(self, slot: Slot) -> None:
        self._registered.wait()
        if (machine := self._machine) is None:
            return  # drained before the machine was known
        lock = DeviceLock(self._lock_file(machine, slot), beside=self._own_lock.fds)
        meters = device_meters(machine)
        try:
            while not self._draining.is_set():
                if not self._run_next(slot, lock=lock, meters=meters):
                    self._rest(slot)
        finally:
            connections.close_all()

    def _rest(self, slot: Slot) -> None:
        """Until there may be work. Where all devices are in use hints are left alone: each would lock the database, mostly to
        find that nothing may join the jobs there.
        """
        is_full = self._machine is not None and self._num_devices_used >= count_devices(self._machine)
        if slot.uses_device and is_full and self._config.shares_if_faster:
            self._draining.wait(self._config.poll_s)
        else:
            self._rest_until_hinted()

    def _rest_until_hinted(self) -> None:
        """A hint reaches one worker, which may be another machine's; so who waits for others to leave a job looks often."""
        is_hasty = time.monotonic() < self._hasty_until_s
        if self._hint.wait(min(HASTY_POLL_S, self._config.poll_s) if is_hasty else self._config.poll_s):
            self._hint.clear()

    def _rest_between_parts(self) -> None:
        """Nothing hints at a part; the other machines wait for it."""
        self._draining.wait(min(MEMBER_POLL_S, self._config.poll_s))

    def _be_hasty(self) -> None:
        self._hasty_until_s = time.monotonic() + HASTY_S
        self._hint.set()

    def _lock_file(self, machine: Machine, slot: Slot) -> Path:
        if slot.uses_device:
            return device_lock_file(machine, slot=slot.name, home=self._config.home)
        return host_lock_file(slot=slot.name, worker=self._config.host, home=self._config.home)

    def _run_next(self, slot: Slot, *, lock: DeviceLock, meters: Sequence[GpuMeter]) -> bool:
        """Run one attempt if there is one; False when there was nothing to do or it could not be done."""
        close_old_connections()
        machine = self._machine
        try:
            if machine is None or (not slot.uses_device and HOST in self._faults.resting()) or not lock.acquire():
                return False
            with self._looking:
                asked_s = boot_s()
                attempt = claim_job(
                    worker=self._config.name,
                    machine=machine,
                    kinds=slot.kinds,
                    lease_s=self._config.lease_s,
                    used_bytes=self._used_bytes() if slot.uses_device else None,
                    must_gain=self._config.shares_if_faster,
                )
                if attempt is None:
                    return False
                self._num_devices_used += len(attempt.devices)
            try:
                place = AttemptPlace(
                    devices=device_names(machine, attempt.devices),
                    cards=visible_cards(machine, attempt.devices),
                    lock=lock,
                    gpu=meters[attempt.devices[0] if attempt.devices else 0],
                )
                outcome = run_attempt(attempt, config=self._config, place=place, asked_s=asked_s, draining=self._draining)
                self._note_end(attempt, outcome)
                if is_joined(attempt.job):
                    self._be_hasty()
            finally:
                with self._looking:
                    self._num_devices_used -= len(attempt.devices)
        except (DatabaseError, OSError) as error:
            logger.warning("the database or the disk cannot be used, will try again: %s", error)
            connections.close_all()
            return False
        finally:
            lock.release()
        return True


    def _note_end(self, attempt: Attempt, outcome: str) -> None:
        """Keep what it says of this machine's devices: those on which a fault was met, or on which the work went on."""
        places = attempt.devices or [HOST]
        if outcome != MachineFault.code:
            if outcome in ENDED_WELL or attempt.made_progress:
                self._faults.note_success(places=places)
            return
        fields = (attempt.error or {}).get("fields", {})
        if fields.get("machine") != self._config.host:
            return  # another's, of a job over several machines
        if (rank := fields.get("rank")) is not None and fields.get("num_ranks") == len(places):
            places = [places[rank]]
        self._faults.note_fault(attempt.job_id, places=places)


_running: Supervisor | None = None


def start_supervisor() -> None:
    """Start the process's one supervisor."""
    global _running
    if _running is None:
        _running = Supervisor(replace(WorkerConfig.from_environment(), token=secrets.token_hex(3)))
        _running.start()


def wake_supervisor() -> None:
    if _running is not None:
        _running.wake()


def drain_supervisor() -> None:
    if _running is not None:
        _running.drain()


def join_supervisor() -> None:
    """Drain and wait. Bounded by the attempts' grace, after which their processes are killed."""
    if _running is not None:
        _running.drain()
        _running.join()
