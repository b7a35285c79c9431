"""Claims the next job that a worker's machine can hold.

The order of what waits is in ``webapp/jobs/turns.py``. A job of several devices keeps those it waits for
(``webapp/jobs/devices/kept.py``). A job over several machines (``webapp/jobs/devices/joined.py``) is claimed by a worker of the
machine that leads it, for all of them in one transaction.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from optimizer.estimate.sharing import Shares, gains, host_need_together, lane_shares, slowdown
from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.devices.joined import Rooms, places_for, ranks_by_machine
from webapp.jobs.devices.kept import PLACED_BY, keeping_gang, room_left_for, waiting_joined
from webapp.jobs.devices.members import add_members
from webapp.jobs.devices.room import Room, needs_by_rank, read_room
from webapp.jobs.models import DEVICE_JOB_KINDS, LIVE_STATES, Attempt, FenceSequence, Job, Kind, State
from webapp.jobs.moves import claimable, move_job, move_jobs
from webapp.jobs.turns import QUEUE_ORDER, stands_ahead, stands_before


def claim_job(
    *,
    worker: str,
    machine: Machine,
    job_id: str | None = None,
    kinds: Collection[Kind] = tuple(Kind),
    lease_s: float = 30,
    used_bytes: Sequence[int] | None = None,
    must_gain: bool = False,
) -> Attempt | None:
    """The next job of these kinds that this machine can hold, in ``QUEUE_ORDER``; None when there is none.

    Live jobs keep the device memory they need. A job of several devices gets all of them at once, under one fence and one lease,
    or none; the first that waits for its devices keeps those it waits for from the jobs behind it. The machine's row is locked,
    so two claims on one machine cannot both take the last free bytes; where the database cannot lock rows (SQLite) its one
    writer gives the same. The host's memory is shared as well: a job does not join others with which it would not fit there, and
    waits as for more to be done.

    used_bytes: memory in use at present by device, from the driver. must_gain: beside jobs that run, take the next one only if
    more is done by all together (``optimizer/estimate/sharing.py``); nothing behind it goes first, so nobody waits for ever.
    """
    candidates = Job.objects.filter(claimable(), kind__in=kinds)
    if job_id is not None:
        candidates = candidates.filter(pk=job_id)
    # nearly every look finds an empty queue; without a transaction it takes neither the machine's row nor SQLite's one write lock
    if not candidates.exists():
        return None
    with transaction.atomic():
        joined = waiting_joined(machine.name) if not set(kinds).isdisjoint(DEVICE_JOB_KINDS) else []
        rows = _lock(machine, joined)
        host = next(row for row in rows if row.pk == machine.pk)
        if host.draining:
            return None
        if used_bytes is not None:
            host.used_bytes = list(used_bytes)
        room = read_room(host)
        rooms = Rooms(rows, {host.name: room}, there_within_s=lease_s / 2)
        found = _choose(candidates, rooms, room, joined=joined, must_gain=must_gain)
        if found is None or (found.places and not _fits_on_host(found.job, room, machine=host)):
            return None
        job = move_job(
            found.job.pk,
            when=claimable(),
            changes={
                "state": State.STARTING,
                "attempt": F("attempt") + 1,
                "fence": _next_fence(),
                "worker": worker,
                "lease_until": from_now(lease_s),
                "progress_at": Now(),
                "not_before": None,
                "phase": "",
                "reason": "",
                "message": "",
                "eta_s": None,
            },
            kind="claimed",
            actor=f"worker:{worker}",
            message=found.message,
        )
        if job is None or job.fence is None:
            return None
        for row, places in {host: found.places, **found.elsewhere}.items():
            _note_others(row, rooms.of(row.name), places=places)
        Attempt.objects.filter(job__in=found.disturbed, fence=F("job__fence")).update(is_shared=True)
        attempt = Attempt.objects.create(
            job=job,
            number=job.attempt,
            fence=job.fence,
            worker=worker,
            machine=host,
            devices=list(found.places),
            plan=job.plan,
            prediction=job.prediction,
            is_shared=bool(found.disturbed),
        )
        add_members(attempt, found.elsewhere, lease_s=lease_s)
        # after the commit: who ends an attempt locks its job's row first and then the machine's, which is locked here
        transaction.on_commit(lambda: _note_disturbed(found, actor=f"worker:{worker}"), robust=True)
        return attempt


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The next job of a machine, and what it gets there."""

    job: Job
    places: tuple[int, ...] = ()
    """Its devices; none for a job that needs no device."""
    disturbed: frozenset[str] = frozenset()
    """Live jobs that run slower beside it, and it beside them."""
    slowdowns: dict[str, float | None] = field(default_factory=dict)
    """By which factor those on its devices are slower than alone; None where the predictions do not say."""
    message: str = ""
    elsewhere: dict[Machine, tuple[int, ...]] = field(default_factory=dict)
    """Its devices on other machines."""


def _lock(machine: Machine, joined: Sequence[Job]) -> list[Machine]:
    """The machine's row, and those of all machines of the jobs that it leads, in the order of their ids, so that two claims never
    wait for each other. A job that comes in between is left to the next claim.
    """
    names = {name for job in joined if _leads(machine.name, job) for name in ranks_by_machine(job)}
    rows = Machine.objects.select_for_update().filter(Q(pk=machine.pk) | Q(name__in=names))
    return list(rows.order_by("pk"))


def _leads(machine: str, job: Job) -> bool:
    return next(iter(ranks_by_machine(job)), "") == machine


def _choose(
    candidates: "QuerySet[Job]", rooms: Rooms, room: Room, *, joined: Sequence[Job], must_gain: bool
) -> _Found | None:
    """The next job for this machine alone, or one over several that stands before it. joined: those that wait."""
    gang = keeping_gang(rooms, room, joined)
    found = _choose_here(candidates, room, gang, must_gain=must_gain)
    own = [job for job in joined if _leads(room.machine, job)]
    allowed = set(candidates.filter(pk__in=[job.pk for job in own]).values_list("pk", flat=True)) if own else set()
    for job in own:
        if found is not None and stands_ahead(found.job, job):
            break
        if job.pk in allowed and (wide := _place_joined(job, rooms, machine=room.machine)):
            return wide
    return found


def _choose_here(candidates: "QuerySet[Job]", room: Room, gang: Job | None, *, must_gain: bool) -> _Found | None:
    """The first job with room, unless a job of several devices stands before it and waits for those that it would take.

    One that has the bytes and would only take turns waits for a device; who leaves that one alone may go first.
    """
    left, allowed = room, room.now()
    if gang is not None:
        left = room.without(room.kept_for(gang))
        needs_none = ~Q(kind__in=DEVICE_JOB_KINDS)
        allowed = (stands_before(gang) | Q(pk=gang.pk) | needs_none) & room.now() | left.now()
    job = _first(candidates.filter(allowed))
    if job is None:
        return None
    is_gang = gang is not None and job.pk == gang.pk
    is_behind = gang is not None and not is_gang and not stands_ahead(job, gang)
    found = _place(job, left if is_behind else room, must_gain=must_gain)
    if found is not None:
        return found
    # an idle device that this one could use would be its own by now, so nobody takes it away
    spared = left if is_gang else left.idle()
    other = _first(candidates.filter(spared.now()).exclude(pk=job.pk)) if spared.devices else None
    return None if other is None else _place(other, spared, must_gain=must_gain)


def _place_joined(job: Job, rooms: Rooms, *, machine: str) -> _Found | None:
    """Devices for a job over several machines; None where one of them is not there, or lacks room, or was not locked."""
    names = ranks_by_machine(job)
    if not rooms.given.issuperset(names) or not rooms.could_hold(job):
        return None
    left = {name: room for name in names if (room := room_left_for(job, rooms, name)) is not None}
    found = places_for(job, left)
    rows = {name: row for name in found if (row := rooms.row(name)) is not None}
    if not found or not all(_fits_on_host(job, left[name], machine=row) for name, row in rows.items()):
        return None
    elsewhere = {rows[name]: places for name, places in found.items() if name != machine}
    # its devices are idle, but who shares the memory shares the cores
    disturbed = frozenset[str]().union(*(room.all_jobs for room in left.values() if room.kind == "cpu"))
    message = f"with {' and '.join(sorted(row.name for row in elsewhere))}"
    return _Found(job=job, places=found[machine], elsewhere=elsewhere, disturbed=disturbed, message=message)


def _first(candidates: "QuerySet[Job]") -> Job | None:
    return candidates.order_by(*QUEUE_ORDER).select_for_update(skip_locked=True).only(*PLACED_BY).first()


def _place(job: Job, room: Room, *, must_gain: bool) -> _Found | None:
    """Devices for a job that has room; None where it would gain too little beside the jobs there."""
    if job.kind not in DEVICE_JOB_KINDS:
        return _Found(job=job)
    places = room.choose(job)
    groups = [group for group in room.jobs_on(places) if group]
    beside = frozenset[str]().union(*groups)
    predictions = dict(Job.objects.filter(pk__in=beside).values_list("pk", "prediction"))
    slowdowns: dict[str, float | None] = {}
    for group in groups:
        shares = _shares([*(predictions[pk] for pk in sorted(group)), job.prediction], device_kind=room.kind)
        if must_gain and not (shares and gains(shares[:-1], shares[-1])):
            return None
        factor = slowdown(shares) if shares else None
        slowdowns |= {pk: _slowest([slowdowns.get(pk, 1.0), factor]) for pk in group}
    disturbed = room.all_jobs if room.kind == "cpu" else beside  # who shares the memory shares the cores
    message = _describe_sharing(len(beside), _slowest(slowdowns.values()))
    return _Found(job=job, places=places, disturbed=disturbed, slowdowns=slowdowns, message=message)


def _note_others(machine: Machine, room: Room | None, *, places: Collection[int]) -> None:
    """Keep what other programs hold of devices on which a job begins with none beside it."""
    devices = [] if room is None else room.devices
    idle = {device.place for device in devices if device.place in places and not device.jobs}
    if idle and machine.used_bytes:
        known = [*machine.others_bytes, *[0] * len(machine.used_bytes)][: len(machine.used_bytes)]
        pairs = enumerate(zip(machine.used_bytes, known, strict=True))
        others = [used if place in idle else before for place, (used, before) in pairs]
        Machine.objects.filter(pk=machine.pk).update(others_bytes=others)


def _fits_on_host(job: Job, room: Room, *, machine: Machine) -> bool:
    """Report whether the host's memory holds the job beside those that run on any of the machine's devices."""
    if not room.all_jobs:
        return True
    needs = ("need_devices", "need_device_bytes", "need_ranks")
    jobs = Job.objects.filter(pk__in=[*room.all_jobs, job.pk]).only("prediction", "model", "plan", *needs)
    needed_bytes = host_need_together(
        (each.prediction, len(needs_by_rank(each, machine=machine.name)), _name_base(each)) for each in jobs
    )
    return needed_bytes <= int(machine.document["host_memory_bytes"])


def _name_base(job: Job) -> str:
    """Jobs of the same name that stream frozen weights from the host have them there once."""
    weights = (job.plan or {}).get("weights") or {}
    return f"{job.model_id} {weights.get('dtype')} {weights.get('frozen')}"


def _shares(predictions: Sequence[dict[str, Any] | None], *, device_kind: str) -> list[Shares]:
    """The lanes that each job keeps busy; nothing where the prediction of one of them does not say."""
    known = [lane_shares(prediction, device_kind=device_kind) for prediction in predictions]
    return [shares for shares in known if shares is not None] if None not in known else []


def _describe_sharing(num_beside: int, slower: float | None) -> str:
    """slower: by which factor than alone; None where the predictions do not say."""
    if not num_beside:
        return ""
    others = f"beside {num_beside} other job{'' if num_beside == 1 else 's'} on the device"
    return f"{others}{_describe_slowdown(slower)}"


def _describe_slowdown(slower: float | None) -> str:
    if slower is None:
        return ""
    return "; no slower than alone" if slower < 1.05 else f"; about {slower:.1f} times as long as alone"


def _slowest(factors: Collection[float | None]) -> float | None:
    """None where one of them is not known."""
    known = [factor for factor in factors if factor is not None]
    return max([1.0, *known]) if len(known) == len(factors) else None


def _note_disturbed(found: _Found, *, actor: str) -> None:
    """Give each job that runs slower from now on an event: which job began beside it, and what is predicted of that.

    The job is named by its id alone, since it may be another person's.
    """
    said: dict[str, list[str]] = {}
    for pk in sorted(found.disturbed):
        if pk in found.slowdowns:
            message = f"{found.job.pk} began beside it on the device{_describe_slowdown(found.slowdowns[pk])}"
        else:
            message = f"{found.job.pk} began on the same machine, whose processor both use"
        said.setdefault(message, []).append(pk)
    for message, ids in said.items():
        move_jobs(ids, when=Q(state__in=LIVE_STATES), changes={}, kind="shared", actor=actor, message=message)


def _next_fence() -> int:
    """Inside the claim's transaction: the row stays locked until the claim commits, so fences grow in commit order."""
    row, _ = FenceSequence.objects.get_or_create(pk=1)
    FenceSequence.objects.filter(pk=row.pk).update(value=F("value") + 1)
    return FenceSequence.objects.get(pk=row.pk).value
