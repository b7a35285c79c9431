"""The queue: jobs in the order in which they will be claimed, and why each of them waits.

The order is the claim's own (``turns.py``). A machine takes the first job that it can hold, so a small job
may start before a larger one that stands ahead of it; not so on devices that are kept for a job that needs several.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from optimizer.base.units import format_bytes, format_duration
from webapp.catalog.documents import ONLINE_WITHIN
from webapp.catalog.models import Machine
from webapp.jobs.devices.joined import Rooms, is_joined, ranks_by_machine
from webapp.jobs.devices.kept import all_waiting_joined, keeping_gang
from webapp.jobs.devices.named import describe_needs, read_needs
from webapp.jobs.devices.room import Room, read_room
from webapp.jobs.models import DEVICE_JOB_KINDS, LIVE_STATES, MEMORY_REASONS, PLAN_REASONS, USER_JOB_KINDS, Job, State
from webapp.jobs.queries import (
    LARGE_DOCUMENTS,
    LARGE_DOCUMENTS_OF_MODEL,
    jobs_visible_to,
    rows_of_page,
    waiting_jobs_visible_to,
)
from webapp.jobs.turns import QUEUE_ORDER, stands_ahead, stands_before

Reason = Literal["paused", "no_plan", "not_yet", "no_machine", "offline", "busy", "next"]
PAGE_SIZE: Final = 50
MAX_LIVE: Final = 200


@dataclass(frozen=True, kw_only=True)
class MachineNow:
    """One machine as a claim would see it."""

    id: str
    name: str
    room: Room
    gang: Job | None
    """The job of several devices that keeps those it waits for."""
    takes_jobs: bool
    """Heard of lately, and not draining."""

    def room_for(self, job: Job) -> Room:
        """The devices that the job may have: none that are kept for one ahead of it."""
        if self.gang is None or self.gang.pk == job.pk or stands_ahead(job, self.gang):
            return self.room
        return self.room.without(self.room.kept_for(self.gang))


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One queued job."""

    job: Job
    position: int
    """From 1, among all people's jobs."""
    reason: Reason
    sentence: str
    machines: tuple[str, ...]
    """Names of those that could hold it, the ones that take jobs first."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue as one person sees it: their own jobs, at their place among all."""

    waiting: tuple[Waiting, ...]
    """One page of them."""
    num_own: int
    """Own jobs that wait, on all pages."""
    num_waiting: int
    """Counted over all people."""
    live: tuple[Job, ...]
    """Being carried out, at most ``MAX_LIVE``."""


def read_queue(user: Any, *, page: int = 1, page_size: int = PAGE_SIZE) -> Queue:
    """One page of the person's own waiting jobs, from 1, and all that are at work. However many wait, as many queries."""
    own = waiting_jobs_visible_to(user)
    start = (page - 1) * page_size
    visible = jobs_visible_to(user).select_related("model").defer(*LARGE_DOCUMENTS, *LARGE_DOCUMENTS_OF_MODEL)
    shown = rows_of_page(own.order_by(*QUEUE_ORDER)[start : start + page_size], visible.filter(state=State.QUEUED))
    positions = _positions(shown)
    machines = _machines()
    live = visible.filter(state__in=LIVE_STATES).order_by("started_at", "pk")[:MAX_LIVE]
    return Queue(
        waiting=tuple(_explain(job, positions[job.pk], machines) for job in shown),
        num_own=own.order_by().count(),
        num_waiting=_all_waiting().order_by().count(),
        live=tuple(live),
    )


def why_it_waits(job: Job) -> str:
    """The sentence that the queue says of a queued job, ``Waiting for a free worker; 2 jobs ahead.``"""
    num_ahead = _all_waiting().filter(stands_before(job)).order_by().count()
    return _explain(job, num_ahead + 1, _machines()).sentence


def _all_waiting() -> QuerySet[Job]:
    return Job.objects.filter(state=State.QUEUED, kind__in=USER_JOB_KINDS)


def _positions(shown: Sequence[Job]) -> dict[str, int]:
    """Places among all people's jobs: a count of those before the first, then the ids from it to the last."""
    if not shown:
        return {}
    first, last = shown[0], shown[-1]
    num_before = _all_waiting().filter(stands_before(first)).order_by().count()
    between = _all_waiting().filter(stands_before(last) & ~stands_before(first)).order_by(*QUEUE_ORDER)
    ids = [*between.values_list("pk", flat=True), last.pk]
    places = {pk: place for place, pk in enumerate(ids, start=num_before + 1)}
    # one that was claimed or moved between the queries keeps its neighbour's place
    return {job.pk: places.get(job.pk, num_before + index) for index, job in enumerate(shown, start=1)}


def _machines() -> list[MachineNow]:
    now = timezone.now()
    found = []
    rows = list(Machine.objects.defer("calibration").order_by("name"))
    read = {row.name: read_room(row) for row in rows}
    rooms = Rooms(rows, read)
    joined = all_waiting_joined() if len(rows) > 1 else []
    for row in rows:
        room = read[row.name]
        machine = MachineNow(
            id=row.pk,
            name=row.name,
            room=room,
            gang=keeping_gang(rooms, room, [job for job in joined if row.name in ranks_by_machine(job)]),
            takes_jobs=now - row.last_seen_at < ONLINE_WITHIN and not row.draining,
        )
        found.append(machine)
    return found


def _explain(job: Job, position: int, machines: Sequence[MachineNow]) -> Waiting:
    names = ranks_by_machine(job) if is_joined(job) else [machine.name for machine in machines]
    suiting = [machine for machine in machines if machine.name in names and machine.room.suits(job)]
    suiting.sort(key=lambda machine: not machine.takes_jobs)
    reason, sentence = next(_reasons(job, machines, suiting, num_ahead=position - 1))
    return Waiting(
        job=job,
        position=position,
        reason=reason,
        sentence=sentence,
        machines=tuple(machine.name for machine in suiting),
    )


def _reasons(
    job: Job, machines: Sequence[MachineNow], suiting: Sequence[MachineNow], *, num_ahead: int
) -> Iterator[tuple[Reason, str]]:
    """The first that holds is the one."""
    if job.pause_requested_at is not None:
        yield "paused", "Paused: it may not start until it is resumed."
    if job.awaits_plan and job.attempt:
        yield "no_plan", between_plans(job)
    if job.awaits_plan:
        yield "no_plan", "Waiting for the model's profile; a plan is chosen then, and the job starts by itself."
    wait_s = (job.not_before - timezone.now()).total_seconds() if job.not_before is not None else 0.0
    if wait_s > 0:
        yield "not_yet", f"Attempt {job.attempt} failed; the next one may start in {format_duration(wait_s)}."
    if is_joined(job):
        yield from _joined_reasons(job, machines)
    if not suiting:
        yield "no_machine", _nothing_suits(job, machines)
    ready = [machine for machine in suiting if machine.takes_jobs]
    if not ready:
        names = ", ".join(machine.name for machine in suiting)
        yield "offline", f"Only {names} could hold it, and no worker there takes jobs at present."
    if ready and (sentence := _what_is_taken(job, ready)):
        yield "busy", sentence
    if not num_ahead and (beside := _only_beside(job, ready)):
        yield "busy", beside
    ahead = f"; {num_ahead} job{'' if num_ahead == 1 else 's'} ahead" if num_ahead else ""
    yield "next", f"Waiting for a free worker{ahead}."


def _joined_reasons(job: Job, machines: Sequence[MachineNow]) -> Iterator[tuple[Reason, str]]:
    """Say what a job over several machines waits for, by machine: who never could, who is away, whose devices are taken."""
    known = {machine.name: machine for machine in machines}
    needs = {name: [need for need in read_needs(job.need_ranks) if need.machine == name] for name in ranks_by_machine(job)}
    too_small = [name for name in needs if name not in known or not known[name].room.suits(job)]
    if too_small:
        yield "no_machine", f"It needs {_listed(describe_needs(needs[name]) for name in too_small)}; there is no such device."
    away = [name for name in needs if name not in known or not known[name].takes_jobs]
    if away:
        taken = f"no worker of {_listed(away)} takes jobs at present.{_and_then(job)}"
        yield "offline", f"It runs on {_listed(needs)} at once; {taken}"
    busy = [known[name] for name in needs if not known[name].room_for(job).idle().has_room_for(job)]
    waits = [_devices_lacking(job, machine) for machine in busy]
    if waits:
        yield "busy", f"It runs on {_listed(needs)} at once, and waits for {_listed(waits)}."


def _and_then(job: Job) -> str:
    """Say when a job that has begun goes on without a machine that stays away."""
    if not job.attempt or settings.HEADROOM_AWAY_S <= 0:
        return ""
    return f" If that lasts for {format_duration(settings.HEADROOM_AWAY_S)}, it goes on without, where a plan fits."


def _devices_lacking(job: Job, machine: MachineNow) -> str:
    """``1 device of office``: so many more than are idle."""
    num_needed = len(ranks_by_machine(job)[machine.name])
    num_lacking = num_needed - min(num_needed, machine.room_for(job).num_idle)
    what = f"{num_lacking} device{'' if num_lacking == 1 else 's'}" if num_lacking else "memory"
    return f"{what} of {machine.name}"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _what_is_taken(job: Job, ready: Sequence[MachineNow]) -> str:
    """Why no machine that takes jobs has room for this one at present; empty where one has."""
    if job.need_ranks:
        return _what_named_lacks(job, ready)
    if job.need_devices > 1:
        idle = max(ready, key=lambda machine: machine.room.num_idle)
        if any(machine.room_for(job).has_room_for(job) and machine.room.num_idle >= job.need_devices for machine in ready):
            return ""
        num_idle = idle.room.num_idle
        return (
            f"It needs {job.need_devices} devices with {format_bytes(job.need_device_bytes)} each at once; "
            f"{num_idle} {'is' if num_idle == 1 else 'are'} free on {idle.name}."
        )
    if any(machine.room_for(job).has_room_for(job) for machine in ready):
        return ""
    for machine in ready:
        if machine.gang is not None and machine.room.has_room_for(job):
            needs = f"a job ahead of it that needs {machine.gang.need_devices} at once"
            return f"The free devices of {machine.name} are kept for {needs}."
    if all(device.empty_bytes < 0 for machine in ready for device in machine.room.devices):
        names = _listed(machine.name for machine in ready)
        return f"The devices of {names} take no job at present: their driver does not answer, or jobs met a fault of the machine."
    most = max(ready, key=lambda machine: max(device.free_bytes for device in machine.room.devices))
    largest = max(device.free_bytes for device in most.room.devices)
    return (
        f"It needs {format_bytes(job.need_device_bytes)}; running jobs leave at most {format_bytes(max(0, largest))} free, "
        f"on {most.name}."
    )


def _only_beside(job: Job, ready: Sequence[MachineNow]) -> str:
    """Say where a job has room beside running ones alone; empty where an idle device has room, or nothing is known to run."""
    with_room = [machine for machine in ready if machine.room_for(job).has_room_for(job)]
    if job.kind not in DEVICE_JOB_KINDS or any(machine.room_for(job).idle().has_room_for(job) for machine in with_room):
        return ""
    names = _listed(machine.name for machine in with_room)
    return f"It fits beside what runs on {names}, and joins it if that gets more done; otherwise it waits for a device."


def _what_named_lacks(job: Job, ready: Sequence[MachineNow]) -> str:
    """The same of a job whose plan names its devices."""
    if any(machine.room_for(job).has_room_for(job) for machine in ready):
        return ""
    needs, machine = read_needs(job.need_ranks), ready[0]
    names = dict.fromkeys(need.device for need in needs)
    devices = [device for device in machine.room_for(job).devices if device.name in names]
    free = ", ".join(f"{device.name} has {format_bytes(max(0, device.free_bytes))}" for device in devices) or "none"
    return f"It needs {describe_needs(needs)}{' at once' * (len(needs) > 1)}; free on {machine.name}: {free}."


def between_plans(job: Job) -> str:
    """Why a job that has run awaits a plan."""
    if job.reason in MEMORY_REASONS:
        return f"Memory ran out in attempt {job.attempt}; another plan is looked for, and the job goes on with it."
    if job.reason in PLAN_REASONS:
        return f"The disk was full in attempt {job.attempt}; a plan that keeps less on it is looked for."
    return f"The first steps of attempt {job.attempt} missed their prediction; its plan is looked at again."


def _nothing_suits(job: Job, machines: Sequence[MachineNow]) -> str:
    size, kind = format_bytes(job.need_device_bytes), job.need_device_kind
    need = f"a {kind or 'any'} device with {size}"
    if job.need_ranks:
        need = f"{describe_needs(read_needs(job.need_ranks))} in one machine"
    elif job.need_devices > 1:
        need = f"{job.need_devices} {kind + ' ' if kind else ''}devices of one machine with {size} each"
    if not machines:
        return f"It needs {need}; no machine has run a worker yet."
    largest = max(machines, key=lambda machine: (machine.room.num_devices >= job.need_devices, machine.room.total_bytes))
    number = f"{largest.room.num_devices} devices, " if job.need_devices > 1 else ""
    return (
        f"It needs {need}; no known machine has {'them' if job.need_devices > 1 else 'one'} (the largest is {largest.name}, "
        f"{largest.room.kind}, {number}{format_bytes(largest.room.total_bytes)}). Clone it with "
        f"{'fewer devices or ' if job.need_devices > 1 else ''}a smaller budget, or start a worker on a larger machine."
    )
