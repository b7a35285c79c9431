"""Counts what is free on each device of a machine, and picks the devices that a job would run on.

A job needs so many devices of one machine and as many bytes on each, all or none. Cards have memory of their own. Devices that
the CPU plays (HEADROOM_DEVICES) share one memory, so each of them can have what is left of the whole, and a job of several takes
its bytes as often.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from django.db.models import F, Q, QuerySet

from optimizer.base.units import GIB
from webapp.catalog.models import Machine
from webapp.jobs.models import DEVICE_JOB_KINDS, LIVE_STATES, Attempt, Job

DESKTOP_BYTES: Final = GIB
"""In use on a card that a screen is connected to, and that nobody calls taken."""


@dataclass(frozen=True, kw_only=True)
class DeviceRoom:
    """One device as a claim sees it."""

    place: int
    """Counted from the machine's first device."""
    free_bytes: int
    """Bytes left beside live jobs and other programs; less than nothing where they hold more than there is."""
    empty_bytes: int
    """Bytes that would be free if no job ran: other programs keep theirs."""
    jobs: frozenset[str]
    """Ids of the live jobs that use it."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The devices of a machine, and the bytes free on each."""

    kind: str
    """``cpu`` or ``cuda``."""
    num_devices: int
    device_bytes: int
    """Memory of one device; on the CPU of all together."""
    devices: tuple[DeviceRoom, ...]
    """Those that may be taken: fewer than all where some are kept for a job that waits."""

    @property
    def shares_memory(self) -> bool:
        """True where all devices are parts of one memory."""
        return self.kind == "cpu"

    @property
    def total_bytes(self) -> int:
        """Memory of all devices."""
        return self.device_bytes * (1 if self.shares_memory else self.num_devices)

    @property
    def free_bytes(self) -> int:
        """Bytes free on all devices together."""
        free = [device.free_bytes for device in self.devices]
        return min(free, default=0) if self.shares_memory else sum(free)

    @property
    def num_idle(self) -> int:
        """Devices that no job uses."""
        return sum(not device.jobs for device in self.devices)

    @property
    def all_jobs(self) -> frozenset[str]:
        """Ids of the live jobs on any of the devices."""
        return frozenset[str]().union(*(device.jobs for device in self.devices))

    def now(self) -> Q:
        """The condition that there is room for a job on devices that are free now."""
        return self._condition([device.free_bytes for device in self.devices])

    def when_empty(self) -> Q:
        """The condition that the machine could hold a job if no other ran."""
        return self._condition([device.empty_bytes for device in self.devices])

    def suits(self, job: Job) -> bool:
        """Report whether the machine could hold the job if no other ran."""
        width = job.need_devices
        of_each = self.device_bytes // (width if self.shares_memory else 1)
        return job.need_device_kind in ("", self.kind) and width <= self.num_devices and job.need_device_bytes <= of_each

    def has_room_for(self, job: Job) -> bool:
        """Report whether the job has room on devices that are free now."""
        width = job.need_devices
        free = [device.free_bytes for device in self.devices]
        return width <= len(free) and job.need_device_bytes <= self._most_bytes(free, width)

    def choose(self, job: Job) -> tuple[int, ...]:
        """Places of the devices that a job with room gets: those with fewest jobs, then with most bytes free."""
        fitting = [device for device in self.devices if device.free_bytes >= job.need_device_bytes]
        chosen = sorted(fitting, key=lambda device: (len(device.jobs), -device.free_bytes, device.place))
        return tuple(sorted(device.place for device in chosen[: job.need_devices]))

    def kept_for(self, job: Job) -> frozenset[int]:
        """Places of the devices that a job without room waits for: those that come nearest to holding it.

        Nothing else begins on them, so they only become freer, and the job's turn comes. Where memory is shared, whatever begins
        takes of it, and all devices are kept.
        """
        if self.shares_memory:
            return frozenset(range(self.num_devices))
        nearest = sorted(self.devices, key=lambda device: (-device.free_bytes, len(device.jobs), device.place))
        return frozenset(device.place for device in nearest[: job.need_devices])

    def without(self, places: Collection[int]) -> "Room":
        return replace(self, devices=tuple(device for device in self.devices if device.place not in places))

    def jobs_on(self, places: Collection[int]) -> list[frozenset[str]]:
        """Ids of the live jobs of each of these devices."""
        return [device.jobs for device in self.devices if device.place in places]

    def _condition(self, device_bytes: Sequence[int]) -> Q:
        """device_bytes: of each device, what a job may have there."""
        widths = Q(pk__in=())
        for width in range(1, len(device_bytes) + 1):
            widths |= Q(need_devices=width, need_device_bytes__lte=self._most_bytes(device_bytes, width))
        return Q(need_device_kind__in=("", self.kind)) & widths

    def _most_bytes(self, device_bytes: Sequence[int], width: int) -> int:
        """Bytes that each of so many devices has at least, if they are chosen well."""
        if self.shares_memory:
            return min(device_bytes) // width
        return sorted(device_bytes, reverse=True)[width - 1]


def read_room(machine: Machine) -> Room:
    """The room beside what live jobs need and beside what else is in use there.

    What a card's driver counts is partly the jobs'. What others held before the first of them began counts beside their needs,
    which they may not have taken yet; beyond it the larger of the two is taken. A desktop and the driver itself are left out, as
    plans leave room for them.
    """
    device, num_devices = machine.document["device"], count_devices(machine)
    device_bytes, shares_memory = int(device["memory_bytes"]), device["kind"] == "cpu"
    taken, jobs = [0] * num_devices, [set[str]() for _ in range(num_devices)]
    for attempt in _live_attempts(machine):
        for place in places_of(attempt, num_devices=num_devices):
            jobs[place].add(attempt.job_id)
            for each in range(num_devices) if shares_memory else (place,):
                taken[each] += attempt.job.need_device_bytes
    used = _beside_desktop(machine.used_bytes, num_devices=num_devices)
    known = _beside_desktop(machine.others_bytes, num_devices=num_devices)
    others = [min(pair) if taken[place] else pair[0] for place, pair in enumerate(zip(used, known, strict=True))]
    devices = tuple(
        DeviceRoom(
            place=place,
            free_bytes=device_bytes - max(taken[place] + others[place], used[place]),
            empty_bytes=device_bytes - max(others[place], used[place] - taken[place]),
            jobs=frozenset(jobs[place]),
        )
        for place in range(num_devices)
    )
    return Room(kind=device["kind"], num_devices=num_devices, device_bytes=device_bytes, devices=devices)


def _beside_desktop(held_bytes: Sequence[int], *, num_devices: int) -> list[int]:
    """By device, bytes beyond those of a desktop; 0 where none are known."""
    beyond = [max(0, num_bytes - DESKTOP_BYTES) for num_bytes in held_bytes]
    return [*beyond, *[0] * num_devices][:num_devices]


def count_devices(machine: Machine) -> int:
    """One where the document was written before machines counted theirs."""
    return int(machine.document.get("num_devices", 1))


def places_of(attempt: Attempt, *, num_devices: int) -> list[int]:
    """The devices of an attempt; the first where none was written down, and none that the machine no longer has."""
    return [place for place in attempt.devices or [0] if place < num_devices]


def live_on(machine: Machine) -> QuerySet[Job]:
    """Jobs that hold devices of the machine at present."""
    live = Job.objects.filter(state__in=LIVE_STATES, kind__in=DEVICE_JOB_KINDS)
    return live.filter(attempts__machine=machine, attempts__fence=F("fence"))


def _live_attempts(machine: Machine) -> QuerySet[Attempt]:
    live = Attempt.objects.filter(machine=machine, fence=F("job__fence"))
    live = live.filter(job__state__in=LIVE_STATES, job__kind__in=DEVICE_JOB_KINDS)
    return live.select_related("job").only("job_id", "devices", "job__need_device_bytes")
