"""Finds what was lost, every few seconds, for the reconciler. Safe to run twice at once; each step is a guarded move."""

import logging
from collections.abc import Iterable, Iterator

from django.db import Error as DatabaseError
from django.db.models import Exists, F, Q
from django.db.models.functions import Coalesce, Now

from webapp.attempts.outcome import finish_attempt
from webapp.clock import from_now
from webapp.jobs.devices.members import end_members_of
from webapp.jobs.models import LIVE_STATES, Attempt, Job, Member, PlanOffer, Reason
from webapp.jobs.moves import claimable, move_job
from webapp.jobs.turns import QUEUE_ORDER
from webapp.wire.hints import send_hint

logger = logging.getLogger(__name__)

NO_PROGRESS_S = 30 * 60
"""Without a new step, phase or checkpoint for this long, a job is taken to hang."""
HINT_AGAIN_S = 30
"""A job that still waits this long after its hint is hinted again: the message may be lost."""
OFFER_KEPT_S = 24 * 3600
"""A priced plan can be taken for this long; each edit of the form writes new ones."""
_HINTS_PER_ROUND = 50
_LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's code of a lock that was not to be had in time."""
_DIED = "its process died, and another one was started"
_MOST_LOCKED = 3
"""Rows that are found locked in a pass; each takes as long as a lock is waited for."""


def expire_leases(*, grace_s: float = 0.0) -> list[str]:
    """Take jobs back from workers whose lease ran out more than ``grace_s`` ago; their ids."""
    expired = Q(lease_until__lt=from_now(-grace_s))
    attempts = Attempt.objects.filter(
        job__state__in=LIVE_STATES, job__lease_until__lt=from_now(-grace_s), fence=F("job__fence")
    )
    return _give_back_all((attempt, expired, None) for attempt in attempts)


def expire_members(*, grace_s: float = 0.0) -> list[str]:
    """Take jobs over several machines back whole where the lease of one machine's part ran out, taken or not; their ids."""
    is_over = Q(lease_until__lt=from_now(-grace_s), ended_at__isnull=True)
    return _give_back_all(_live_parts(is_over))


def give_back_all_of(worker: str, *, actor: str) -> list[str]:
    """Take back, before its leases end, what a worker held that is gone with all of its processes, as the caller knows for
    certain; the ids of the jobs. The devices of its parts of jobs over several machines are free from then on.
    """
    held = Q(worker=worker)
    live = Attempt.objects.filter(held, job__state__in=LIVE_STATES, fence=F("job__fence"))
    parts = list(_live_parts(held & Q(ended_at__isnull=True)))
    for _, _, member in parts:
        member.trouble = _DIED
    lost: list[tuple[Attempt, Q, Member | None]] = [*((attempt, held, None) for attempt in live), *parts]
    given = _give_back_all(lost, actor=actor, loss=f"the worker was lost: {_DIED}", must_have_all=True)
    end_members_of(worker)
    return given


def _live_parts(which: Q) -> Iterator[tuple[Attempt, Q, Member]]:
    lost = Member.objects.filter(which, attempt__fence=F("attempt__job__fence"), attempt__job__state__in=LIVE_STATES)
    for member in lost.select_related("attempt"):
        yield member.attempt, Q(Exists(Member.objects.filter(which, pk=member.pk))), member


def _give_back_all(
    lost: Iterable[tuple[Attempt, Q, Member | None]],
    *,
    actor: str = "reconciler",
    loss: str | None = None,
    must_have_all: bool = False,
) -> list[str]:
    """The ids of those that were given back.

    One whose row is locked keeps no other waiting: a worker that was halted within a write holds it until PostgreSQL ends its
    transaction. Raises the error where no row was to be had, since then all may be locked, or with ``must_have_all`` one was not.
    """
    given: list[str] = []
    locked: list[DatabaseError] = []
    for attempt, only_if, member in lost:
        try:
            if _give_back(attempt, only_if=only_if, lost=member, actor=actor, loss=loss):
                given.append(attempt.job_id)
        except DatabaseError as error:
            if getattr(error.__cause__, "sqlstate", None) != _LOCK_NOT_AVAILABLE or len(locked) == _MOST_LOCKED:
                raise
            logger.warning("%s waits, its row is locked: %s", attempt, error)
            locked.append(error)
    if locked and (must_have_all or not given):
        raise locked[-1]
    return given


def _give_back(attempt: Attempt, *, only_if: Q, lost: Member | None, actor: str, loss: str | None) -> bool:
    """False when the lease was renewed meanwhile, or after a fault of the program, which must not keep the other jobs."""
    try:
        end = finish_attempt(attempt, result=None, exit_code=None, actor=actor, only_if=only_if, lost=lost, loss=loss)
    except DatabaseError:
        raise
    except Exception:
        logger.exception("%s, whose worker was lost, cannot be given back", attempt)
        return False
    return end != "stale"


def resend_hints() -> list[str]:
    """Announce again to the broker the jobs that may start and were not announced lately. Returns the ids it took."""
    stale_hint = Q(hinted_at__isnull=True) | Q(hinted_at__lt=from_now(-HINT_AGAIN_S))
    waiting = Job.objects.filter(claimable() & stale_hint).order_by(*QUEUE_ORDER)
    sent = []
    for job_id in list(waiting.values_list("pk", flat=True)[:_HINTS_PER_ROUND]):
        if not send_hint(job_id):
            break  # the broker is down; the next round tries again
        Job.objects.filter(pk=job_id).update(hinted_at=Now())
        sent.append(job_id)
    return sent


def enforce_deadlines() -> list[str]:
    """Ask live jobs to stop that ran too long (they save first) or hang (they are killed); their ids.

    Not those whose lease has run out: their worker is lost, as all are after a restored backup, and they are given back.
    """
    live = Q(state__in=LIVE_STATES, cancel_requested_at__isnull=True, lease_until__gte=Now())
    too_long = live & Q(max_duration_s__isnull=False, started_at__isnull=False)
    stopped = [
        job.pk
        for job in Job.objects.filter(too_long)
        if _ask_to_stop(
            job,
            when=live & Q(started_at__lt=from_now(-float(job.max_duration_s or 0))),
            mode="save",
            reason=Reason.MAX_DURATION,
            message=f"the job ran longer than its limit of {job.max_duration_s} s",
        )
    ]
    hanging = live & Q(progress_at__lt=from_now(-NO_PROGRESS_S))
    return stopped + [
        job.pk
        for job in Job.objects.filter(hanging)
        if _ask_to_stop(
            job,
            when=hanging,
            mode="discard",
            reason=Reason.NO_PROGRESS,
            message=f"no new step for {NO_PROGRESS_S // 60} minutes",
        )
    ]


def forget_old_offers() -> int:
    """Delete priced plans that nobody took in a day; a job holds its own copy of the plan."""
    deleted, _ = PlanOffer.objects.filter(created_at__lt=from_now(-OFFER_KEPT_S)).delete()
    return deleted


def _ask_to_stop(job: Job, *, when: Q, mode: str, reason: Reason, message: str) -> bool:
    changes = {
        "cancel_requested_at": Coalesce(F("cancel_requested_at"), Now()),
        "cancel_mode": mode,
        "reason": reason,
        "message": message,
    }
    moved = move_job(
        job.pk, when=when, changes=changes, kind="cancel_requested", actor="reconciler", reason=reason, message=message
    )
    return moved is not None
