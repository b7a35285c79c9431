"""Jobs over several machines: what each of their machines must have, and whether all have it at once.

The machine of rank 0 leads: a worker there claims the job for all of them. A job takes only devices that no other uses, since its
slowest rank is its speed. Which of the waiting jobs keeps devices is decided in ``kept.py``.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Final

from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.devices.named import JOINED, read_needs
from webapp.jobs.devices.room import Room, read_room
from webapp.jobs.models import Job

THERE_WITHIN_S: Final = 15.0
"""A machine that was heard of so lately is there: three beats of its worker. One that was just lost is given no part of a job, as
the job would wait for that part's lease to run out."""


def is_joined(job: Job) -> bool:
    """Report whether the job runs on several machines."""
    return job.need_device_kind == JOINED


def ranks_by_machine(job: Job) -> dict[str, list[int]]:
    """The ranks of each machine by its name; the machine that leads is the first."""
    found: dict[str, list[int]] = {}
    for rank, need in enumerate(read_needs(job.need_ranks)):
        found.setdefault(need.machine, []).append(rank)
    return found


def machine_words(job: Job) -> str:
    """The machines of the job in words, the one that leads first: ``home``, ``home and office``; empty where none is known."""
    if is_joined(job):
        return " and ".join(ranks_by_machine(job))
    return job.machine.name if job.machine is not None else ""


class Rooms:
    """Machines by name with their rooms, each of which is read once."""

    def __init__(
        self, rows: Iterable[Machine], read: Mapping[str, Room] = MappingProxyType({}), *, there_within_s: float = THERE_WITHIN_S
    ) -> None:
        """rows: machines that are at hand; others are read when they are asked for. read: rooms that were read already.
        there_within_s: since then a machine that is there was heard of.
        """
        self._rows: dict[str, Machine | None] = {row.name: row for row in rows}
        self.given = frozenset(self._rows)
        """Names of the machines that were at hand."""
        self._rooms = dict(read)
        self._there_within_s = there_within_s
        self.gangs: dict[str, Job | None] = {}
        """By machine, the waiting job that keeps devices there, as far as it was looked for."""

    def row(self, name: str) -> Machine | None:
        if name not in self._rows:
            self._rows[name] = Machine.objects.filter(name=name).first()
        return self._rows[name]

    def of(self, name: str) -> Room | None:
        """None for a machine that nobody has registered."""
        row = self.row(name)
        if row is not None and name not in self._rooms:
            self._rooms[name] = read_room(row)
        return self._rooms.get(name)

    def is_there(self, name: str) -> bool:
        """Report whether the machine's worker was heard of lately and takes jobs."""
        return name in self._there

    @cached_property
    def _there(self) -> frozenset[str]:
        found = Machine.objects.filter(last_seen_at__gte=from_now(-self._there_within_s), draining=False)
        return frozenset(found.values_list("name", flat=True))

    def could_hold(self, job: Job) -> bool:
        """Report whether all of the job's machines are there and could hold it if no other job ran."""
        rooms = [self.of(name) if self.is_there(name) else None for name in ranks_by_machine(job)]
        return all(room is not None and room.holds_when_empty(job) for room in rooms)


def places_for(job: Job, rooms: Mapping[str, Room]) -> dict[str, tuple[int, ...]]:
    """Places for the job's ranks on each of its machines; empty where one of them has no room on idle devices.

    rooms: of all of its machines, each without the devices that are kept for a job ahead of it.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in ranks_by_machine(job):
        idle = rooms[name].idle()
        places = idle.choose(job) if idle.has_room_for(job) else ()
        if not places:
            return {}
        found[name] = places
    return found
