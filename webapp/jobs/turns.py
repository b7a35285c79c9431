"""The order of what waits, each new job's place in it, and whether there is room for one more.

``QUEUE_ORDER`` is the one order: claims, the queue that is shown and the reconciler all sort by it. Higher priority first, then
by ``turn``, then older. A turn is given when a job is made: profiles get 0, because planning waits for them; a person's jobs get
one turn each, beginning where the queue stands at present. So people who have many jobs waiting and people who have one take
turns, and nobody waits for all that another has submitted (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, section
2.1, with every job of size one). A turn is a column and not a rank among what waits: ranks move up with each claim, and whose
first job is the oldest would be first again each time.
"""

from typing import Any, Final

from django.contrib.auth.models import User
from django.db.models import Q, QuerySet

from webapp.accounts.limits import check_queue_room
from webapp.accounts.models import Project
from webapp.jobs.models import Job, Kind, State
from webapp.jobs.moves import claimable
from webapp.prepared import Prepared, number_mark

QUEUE_ORDER: Final = ("-priority", "turn", "created_at", "id")
PROFILE_TURN: Final = 0
_FIRST_TURN: Final = 1


def require_queue_room(user: Any, project: Project | None) -> None:
    """Raises LimitReached where no further job of this person or project may wait.

    Counted without a lock: a few jobs made at the same moment may go past a limit.
    """
    waiting = Job.objects.filter(state=State.QUEUED).order_by()
    check_queue_room(
        "you have",
        lambda: waiting.filter(owner=user).count(),
        setting="HEADROOM_MAX_QUEUED_PER_PERSON",
        key=f"person {user.pk}",
    )
    if project is not None:
        check_queue_room(
            f"project {project.name} has",
            lambda: waiting.filter(project=project).count(),
            setting="HEADROOM_MAX_QUEUED_PER_PROJECT",
            key=project.pk,
        )


def next_turn(owner: User | None, *, kind: str) -> int:
    """The turn of a job that its owner submits now. Two that are made at the same moment may share one, and age decides."""
    if kind == Kind.PROFILE:
        return PROFILE_TURN
    last = _LAST_TURN.values(owner_id=owner.pk) if owner is not None else list(_last_turn(None))
    return int(max((_FIRST_TURN, *(turn for (turn,) in _PRESENT_TURN.values()), *(turn + 1 for (turn,) in last))))


def _present_turn() -> "QuerySet[Job, Any]":
    # what is paused or awaits its plan does not hold the others' turns back, nor does who was moved
    ordinary = Job.objects.filter(claimable(), priority=0, turn__gte=_FIRST_TURN)
    return ordinary.order_by("turn", "created_at", "id").values_list("turn")[:1]


def _last_turn(owner_id: int | None) -> "QuerySet[Job, Any]":
    waiting = Job.objects.filter(owner=owner_id, state=State.QUEUED)
    return waiting.order_by("-turn").values_list("turn")[:1]


_PRESENT_TURN: "Prepared[Job]" = Prepared(_present_turn)
_LAST_TURN: "Prepared[Job]" = Prepared(lambda: _last_turn(number_mark("owner_id")), "owner_id")


def stands_before(job: Job) -> Q:
    """The condition that another waiting job is claimed earlier than this one."""
    same_turn = Q(priority=job.priority, turn=job.turn)
    return (
        Q(priority__gt=job.priority)
        | Q(priority=job.priority, turn__lt=job.turn)
        | (same_turn & Q(created_at__lt=job.created_at))
        | (same_turn & Q(created_at=job.created_at, id__lt=job.pk))
    )


def stands_ahead(job: Job, other: Job) -> bool:
    """``stands_before`` of two jobs that were read."""
    return standing(job) < standing(other)


def standing(job: Job) -> tuple[Any, ...]:
    return (-job.priority, job.turn, job.created_at, job.pk)
