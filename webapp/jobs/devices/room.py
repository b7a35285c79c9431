"""Counts what is free on each device of a machine, and picks the devices that a job would run on.

A job needs so many devices of one machine and as many bytes on each, all or none. Cards have memory of their own. Devices that
the CPU plays (HEADROOM_DEVICES) share one memory, so each of them can have what is left of the whole, and a job of several takes
its bytes as often; played devices that were given bytes of their own are like cards.

A machine may have devices of several kinds (``named.py``): a job whose plan names its devices gets just those. Of a job over
several machines (``joined.py``) a machine's room counts the ranks that it is named for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from optimizer.base.units import GIB
from webapp.catalog.models import Machine
from webapp.jobs.devices.named import NAMED, RankNeed, assign, read_needs
from webapp.jobs.models import DEVICE_JOB_KINDS, LIVE_STATES, Attempt, Job, Member, State

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
    name: str = ""
    total_bytes: int = 0
    """Its memory; on the CPU that of all together, where they share one."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The devices of a machine, and the bytes free on each."""

    machine: str
    """Its name."""
    kind: str
    """``cpu`` or ``cuda``."""
    num_devices: int
    shares_memory: bool
    """True where all devices are parts of one memory."""
    total_bytes: int
    """Memory of all devices."""
    devices: tuple[DeviceRoom, ...]
    """Those that may be taken: fewer than all where some are kept for a job that waits."""
    waiting_needs: tuple[str, ...] = ()
    """Needs of waiting jobs that name their devices, as ``Job.need_ranks``; read where there are several kinds."""

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
        return self._condition({device.place: device.free_bytes for device in self.devices})

    def when_empty(self) -> Q:
        """The condition that the machine could hold a job if no other ran."""
        return self._condition({device.place: device.empty_bytes for device in self.devices})

    def suits(self, job: Job) -> bool:
        """Report whether the machine could hold the job if no other ran."""
        if job.need_ranks:
            return self._holds(job.need_ranks, {device.place: device.total_bytes for device in self.devices})
        width = job.need_devices
        if job.need_device_kind not in ("", self.kind) or width > self.num_devices:
            return False
        return job.need_device_bytes <= self._most_bytes([device.total_bytes for device in self.devices], width)

    def has_room_for(self, job: Job) -> bool:
        """Report whether the job has room on devices that are free now."""
        if job.need_ranks:
            return self._holds(job.need_ranks, {device.place: device.free_bytes for device in self.devices})
        width = job.need_devices
        free = [device.free_bytes for device in self.devices]
        return width <= len(free) and job.need_device_bytes <= self._most_bytes(free, width)

    def holds_when_empty(self, job: Job) -> bool:
        """Report whether the machine could hold a job whose plan names its devices if no other job ran."""
        return self._holds(job.need_ranks, {device.place: device.empty_bytes for device in self.devices})

    def choose(self, job: Job) -> tuple[int, ...]:
        """Places of the devices that a job with room gets: those with fewest jobs, then with most bytes free.

        In the order of its ranks, where its plan names their devices.
        """
        preferred = sorted(self.devices, key=lambda device: (len(device.jobs), -device.free_bytes, device.place))
        if job.need_ranks:
            free = {device.place: device.free_bytes for device in preferred}
            return self._assign(job.need_ranks, preferred, free) or ()
        chosen = [device for device in preferred if device.free_bytes >= job.need_device_bytes]
        return tuple(sorted(device.place for device in chosen[: job.need_devices]))

    def kept_for(self, job: Job) -> frozenset[int]:
        """Places of the devices that a job without room waits for: those that come nearest to holding it.

        Nothing else begins on them, so they only become freer, and the job's turn comes. Where memory is shared, whatever begins
        takes of it, and all devices are kept.
        """
        if self.shares_memory:
            return frozenset(range(self.num_devices))
        nearest = sorted(self.devices, key=lambda device: (-device.free_bytes, len(device.jobs), device.place))
        if job.need_ranks:
            unlimited = {device.place: device.total_bytes for device in nearest}
            return frozenset(self._assign(job.need_ranks, nearest, unlimited) or ())
        return frozenset(device.place for device in nearest[: job.need_devices])

    def idle(self) -> "Room":
        """The same with the devices alone that no job uses."""
        return self.without([device.place for device in self.devices if device.jobs])

    def without(self, places: Collection[int]) -> "Room":
        return replace(self, devices=tuple(device for device in self.devices if device.place not in places))

    def jobs_on(self, places: Collection[int]) -> list[frozenset[str]]:
        """Ids of the live jobs of each of these devices."""
        return [device.jobs for device in self.devices if device.place in places]

    def _condition(self, device_bytes: Mapping[int, int]) -> Q:
        """device_bytes: of each device, by its place, what a job may have there."""
        widths = Q(pk__in=())
        for width in range(1, len(device_bytes) + 1):
            widths |= Q(need_devices=width, need_device_bytes__lte=self._most_bytes([*device_bytes.values()], width))
        found = Q(need_device_kind__in=("", self.kind)) & widths
        held = [needs for needs in self.waiting_needs if self._holds(needs, device_bytes)]
        return found | Q(need_device_kind=NAMED, need_ranks__in=held) if held else found

    def _holds(self, needs: str, device_bytes: Mapping[int, int]) -> bool:
        return self._assign(needs, self.devices, device_bytes) is not None

    def _assign(
        self, needs: str, devices: Sequence[DeviceRoom], free_bytes: Mapping[int, int]
    ) -> tuple[int, ...] | None:
        own = self._own(needs)
        if self.shares_memory and sum(need.num_bytes for need in own) > min(free_bytes.values(), default=0):
            return None
        return assign(own, devices, free_bytes)

    def _own(self, needs: str) -> list[RankNeed]:
        return [need for need in read_needs(needs) if need.machine in ("", self.machine)]

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
    kinds = device_kinds(machine)
    of_place = [device for device, number in kinds for _ in range(number)]
    num_devices, shares_memory = len(of_place), shares_one_memory(machine)
    taken, jobs = [0] * num_devices, [set[str]() for _ in range(num_devices)]
    for hold in live_holds(machine, num_devices=num_devices):
        for place, need_bytes in hold.bytes_by_place:
            jobs[place].add(hold.job_id)
            for each in range(num_devices) if shares_memory else (place,):
                taken[each] += need_bytes
    used = _beside_desktop(machine.used_bytes, num_devices=num_devices)
    known = _beside_desktop(machine.others_bytes, num_devices=num_devices)
    others = [min(pair) if taken[place] else pair[0] for place, pair in enumerate(zip(used, known, strict=True))]
    devices = tuple(
        DeviceRoom(
            place=place,
            name=str(device.get("name", "")),
            total_bytes=int(device["memory_bytes"]),
            free_bytes=int(device["memory_bytes"]) - max(taken[place] + others[place], used[place]),
            empty_bytes=int(device["memory_bytes"]) - max(others[place], used[place] - taken[place]),
            jobs=frozenset(jobs[place]),
        )
        for place, device in enumerate(of_place)
    )
    return Room(
        machine=machine.name,
        kind=of_place[0]["kind"],
        num_devices=num_devices,
        shares_memory=shares_memory,
        total_bytes=devices[0].total_bytes if shares_memory else sum(device.total_bytes for device in devices),
        devices=devices,
        waiting_needs=_waiting_needs() if len(kinds) > 1 else (),
    )


def _waiting_needs() -> tuple[str, ...]:
    waiting = Job.objects.filter(state=State.QUEUED, need_device_kind=NAMED).order_by()
    return tuple(waiting.values_list("need_ranks", flat=True).distinct())


def _beside_desktop(held_bytes: Sequence[int], *, num_devices: int) -> list[int]:
    """By device, bytes beyond those of a desktop; 0 where none are known."""
    beyond = [max(0, num_bytes - DESKTOP_BYTES) for num_bytes in held_bytes]
    return [*beyond, *[0] * num_devices][:num_devices]


def device_kinds(machine: Machine) -> list[tuple[dict[str, Any], int]]:
    """The machine's devices by kind, each with how many there are: their places follow each other in this order.

    One device where the document was written before machines counted theirs.
    """
    document = machine.document
    others = [(kind["device"], int(kind.get("num_devices", 1))) for kind in document.get("others") or []]
    return [(document["device"], int(document.get("num_devices", 1))), *others]


def full_bytes(device: dict[str, Any]) -> int:
    """Bytes in use on a device, as a driver counts them, beside which not even a job that needs none has room."""
    return int(device["memory_bytes"]) + DESKTOP_BYTES + 1


def largest_device(machine: Machine) -> dict[str, Any]:
    """The document of the device with the most memory, the first of equals."""
    return max((device for device, _ in device_kinds(machine)), key=lambda device: int(device["memory_bytes"]))


def count_devices(machine: Machine) -> int:
    """Devices of all kinds."""
    return sum(number for _, number in device_kinds(machine))


def shares_one_memory(machine: Machine) -> bool:
    """Report whether all devices are played by the CPU and none was given bytes of its own."""
    device = machine.document["device"]
    return device["kind"] == "cpu" and not device.get("is_capped")


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Devices of one machine that a job at work has."""

    job_id: str
    worker: str
    bytes_by_place: tuple[tuple[int, int], ...]
    """Places that the machine still has, each with the bytes that are kept for the job there."""


def live_holds(machine: Machine, *, num_devices: int) -> list[Hold]:
    """List what attempts hold that the machine leads, and what members hold of attempts that others lead."""
    holds = [
        Hold(job_id=attempt.job_id, worker=attempt.worker, bytes_by_place=_held_by(attempt, machine, num_devices=num_devices))
        for attempt in _live_attempts(machine)
    ]
    for member in members_on(machine).select_related("attempt"):
        held = tuple(pair for pair in zip(member.devices, member.device_bytes, strict=True) if pair[0] < num_devices)
        holds.append(Hold(job_id=member.attempt.job_id, worker=member.worker, bytes_by_place=held))
    return holds


def members_on(machine: Machine) -> QuerySet[Member]:
    """Members that have the machine's devices: their processes may be there as long as their lease runs, also when the attempt
    has ended."""
    is_live = Q(attempt__fence=F("attempt__job__fence"), attempt__job__state__in=LIVE_STATES)
    return Member.objects.filter(is_live | Q(lease_until__gte=Now()), machine=machine, ended_at__isnull=True)


def needs_by_rank(job: Job, *, machine: str) -> list[int]:
    """Bytes that the job needs on each of its devices of this machine, in the order of its ranks."""
    named = [need.num_bytes for need in read_needs(job.need_ranks) if need.machine in ("", machine)]
    return named or [job.need_device_bytes] * job.need_devices


def _held_by(attempt: Attempt, machine: Machine, *, num_devices: int) -> tuple[tuple[int, int], ...]:
    """The first device counts where none was written down, and none that the machine no longer has."""
    needs, job = needs_by_rank(attempt.job, machine=machine.name), attempt.job
    places = [place for place in attempt.devices or [0] if place < num_devices]
    return tuple(zip(places, needs if len(needs) == len(places) else [job.need_device_bytes] * len(places), strict=True))


def _live_attempts(machine: Machine) -> QuerySet[Attempt]:
    live = Attempt.objects.filter(machine=machine, fence=F("job__fence"))
    live = live.filter(job__state__in=LIVE_STATES, job__kind__in=DEVICE_JOB_KINDS)
    return live.select_related("job").only(
        "job_id", "devices", "worker", "job__need_device_bytes", "job__need_devices", "job__need_ranks"
    )
