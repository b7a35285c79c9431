"""The waiting job that keeps devices of a machine for itself.

A job of several devices needs them all at once, and narrower jobs would take each that becomes free. So the first such job that
this machine could hold keeps the devices it waits for: what stands behind it begins on others or not at all. What stands before
it, by priority or turn, goes first as ever; profiles and exports need no device. Jobs that are paused, await a plan or have a
later time to start keep nothing, and of several such jobs only the first does.

The first of the jobs over several machines (``joined.py``) that a machine is named for keeps its devices there likewise, once
all of its machines are there.
"""

from collections.abc import Sequence
from typing import Final

from webapp.jobs.devices.joined import Rooms
from webapp.jobs.devices.room import Room
from webapp.jobs.models import DEVICE_JOB_KINDS, Job, State
from webapp.jobs.moves import claimable
from webapp.jobs.turns import QUEUE_ORDER, standing, stands_ahead

PLACED_BY: Final = (
    *("kind", "prediction", "priority", "turn", "created_at"),
    *("need_devices", "need_device_kind", "need_device_bytes", "need_ranks"),
)
"""The columns of a job that say whether it stands ahead of another and which devices it would get."""


def waiting_joined(machine: str) -> list[Job]:
    """Claimable jobs over several machines, this one of them, in the queue's order. Nearly always none, which the index of what
    is joined says without a look at the queue."""
    ids = list(Job.joined.through.objects.filter(machine__name=machine).values_list("job_id", flat=True))
    return list(Job.objects.filter(claimable(), pk__in=ids).order_by(*QUEUE_ORDER).only(*PLACED_BY)) if ids else []


def all_waiting_joined() -> list[Job]:
    """The same over whichever machines."""
    ids = set(Job.joined.through.objects.filter(job__state=State.QUEUED).values_list("job_id", flat=True))
    return list(Job.objects.filter(claimable(), pk__in=ids).order_by(*QUEUE_ORDER).only(*PLACED_BY)) if ids else []


def room_left_for(job: Job, rooms: Rooms, machine: str) -> Room | None:
    """The devices of a machine that the job may have: none that are kept for one ahead of it."""
    room = rooms.of(machine)
    gang = None if room is None else keeping_gang(rooms, room)
    if room is None or gang is None or gang.pk == job.pk or stands_ahead(job, gang):
        return room
    return room.without(room.kept_for(gang))


def keeping_gang(rooms: Rooms, room: Room, joined: Sequence[Job] | None = None) -> Job | None:
    """The job that keeps devices of this machine: the first claimable one of several devices that it could hold its part of if no
    other ran. Looked for once in the life of ``rooms``.

    joined: jobs over this machine and others that wait, where they are at hand.
    """
    if room.machine in rooms.gangs:
        return rooms.gangs[room.machine]
    waiting = waiting_joined(room.machine) if joined is None else joined
    found = [next((job for job in waiting if rooms.could_hold(job)), None)]
    if room.num_devices > 1:
        own = Job.objects.filter(claimable() & room.when_empty(), kind__in=DEVICE_JOB_KINDS, need_devices__gt=1)
        found.append(own.order_by(*QUEUE_ORDER).only(*PLACED_BY).first())
    gang = min((job for job in found if job is not None), key=standing, default=None)
    rooms.gangs[room.machine] = gang
    return gang
