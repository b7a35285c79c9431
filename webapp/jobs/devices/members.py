"""Parts of attempts over several machines: made with the claim, taken by a worker of each machine, kept by a lease of its own.

What a member's worker may do ends with the attempt's fence, as what the attempt's own worker may do.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.db.models import F, QuerySet
from django.db.models.functions import Now

from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.devices.joined import ranks_by_machine
from webapp.jobs.devices.room import needs_by_rank
from webapp.jobs.models import LIVE_STATES, Attempt, Member


@dataclass(frozen=True, kw_only=True)
class MemberLease:
    """The answer to a worker that renews a member's lease. What people ask of the job is for the attempt's own worker to hear."""

    held: bool
    """False: the attempt has ended, or its fence is no longer the job's. Kill the child, write nothing more."""
    cancel_mode: str = ""
    pause_requested: bool = False
    drains: bool = False


def add_members(attempt: Attempt, places: Mapping[Machine, Collection[int]], *, lease_s: float) -> None:
    """Inside the claim. places: of the attempt's devices on each machine but its own, in the order of its ranks there."""
    ranks = ranks_by_machine(attempt.job) if places else {}
    for machine, devices in places.items():
        Member.objects.create(
            attempt=attempt,
            machine=machine,
            machine_name=machine.name,
            ranks=ranks[machine.name],
            devices=list(devices),
            device_bytes=needs_by_rank(attempt.job, machine=machine.name),
            lease_until=from_now(lease_s),
        )


def take_member(machine: Machine, *, worker: str, lease_s: float) -> Member | None:
    """A part of an attempt that waits for a worker of this machine; each is taken once."""
    waiting = _live().filter(machine=machine, worker="").select_related("attempt__job__model")
    for member in waiting.order_by("pk"):
        changes = {"worker": worker, "lease_until": from_now(lease_s)}
        if Member.objects.filter(pk=member.pk, worker="", ended_at__isnull=True).update(**changes):
            member.worker = worker
            return member
    return None


def renew_member(member: Member, *, lease_s: float) -> MemberLease:
    held = _own(member).filter(pk__in=_live().values("pk")).update(lease_until=from_now(lease_s))
    return MemberLease(held=bool(held))


def ask_to_drain(member: Member) -> None:
    """Have the attempt's own worker end it at a checkpoint; it hears of that when it renews its lease."""
    _own(member).update(is_draining=True)


def end_member(member: Member) -> None:
    """Its processes are gone, and its devices free."""
    _own(member).update(ended_at=Now())


def end_members_of(worker: str) -> None:
    """The same for all parts of a worker that is gone with its processes."""
    Member.objects.filter(worker=worker, ended_at__isnull=True).update(ended_at=Now())


def lose_member(member: Member, trouble: str) -> None:
    """Its worker cannot go on: the lease ends now, and the next pass of the reconciler takes the whole job back."""
    _own(member).update(trouble=trouble, lease_until=from_now(-1))


def drains(attempt: Attempt) -> bool:
    """Report whether a member's worker was asked to stop."""
    return Member.objects.filter(attempt=attempt, is_draining=True).exists()


def describe_loss(member: Member) -> str:
    """In words, what became of its part."""
    if member.trouble:
        return f"{member.machine_name} gave up its part of the job: {member.trouble}"
    return f"{member.machine_name} {'was lost' if member.worker else 'did not begin its part of the job in time'}"


def _own(member: Member) -> QuerySet[Member]:
    return Member.objects.filter(pk=member.pk, worker=member.worker, ended_at__isnull=True)


def _live() -> QuerySet[Member]:
    return Member.objects.filter(
        ended_at__isnull=True, attempt__fence=F("attempt__job__fence"), attempt__job__state__in=LIVE_STATES
    )
