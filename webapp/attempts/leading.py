"""The lead among reconcilers, and the alarm where none works.

The lead is a row with a term, like a job's lease. A lock of the database's session would be lost from sight in a pool of
connections, would stay with a program that no longer moves, and nobody could see since when there is no leader.
"""

from django.db.models import Case, Count, F, Q, When
from django.db.models.functions import Now

from webapp.clock import from_now
from webapp.jobs.models import LIVE_STATES, Job, Lead, State
from webapp.jobs.moves import claimable

ALARM_S = 60
"""Jobs that nobody has looked after for this long are reported."""
_ROW = 1


def take_lead(holder: str, *, term_s: float, gap_s: float) -> bool:
    """Take the lead for ``term_s``, or renew it; False while another holds it.

    gap_s: between two renewals, more than this breaks what ``is_unbroken_for`` counts.
    """
    Lead.objects.bulk_create([Lead(pk=_ROW)], ignore_conflicts=True)
    # a term that ends later than any could: the clock was set back
    is_free = Q(held_until__isnull=True) | Q(held_until__lt=Now()) | Q(held_until__gt=from_now(2 * term_s))
    is_kept_up = Q(held_until__gte=from_now(term_s - gap_s), unbroken_since__lte=Now())
    taken = Lead.objects.filter(Q(holder=holder) | is_free, pk=_ROW).update(
        holder=holder,
        held_until=from_now(term_s),
        unbroken_since=Case(When(is_kept_up, then=F("unbroken_since")), default=Now()),
    )
    return bool(taken)


def is_unbroken_for(seconds: float) -> bool:
    """Report whether somebody has led for so long, so that a live worker has had the time to renew its lease."""
    return Lead.objects.filter(unbroken_since__lte=from_now(-seconds)).exists()


def record_pass(holder: str) -> None:
    """A whole pass is done. Nothing changes where another leads by now."""
    Lead.objects.filter(pk=_ROW, holder=holder).update(acted_at=Now())


def release_lead(holder: str) -> None:
    """Let another reconciler take over at once."""
    Lead.objects.filter(pk=_ROW, holder=holder).update(held_until=Now())


def silent_s() -> float | None:
    """Seconds, by the database's clock, since a reconciler last did a whole pass; None where none ever did."""
    found = Lead.objects.filter(pk=_ROW).annotate(now=Now()).values_list("acted_at", "now").first()
    acted_at, now = found or (None, None)
    return None if acted_at is None or now is None else max(0.0, (now - acted_at).total_seconds())


def num_expired_leases() -> int:
    """Jobs at work whose lease ran out; more than none for long is a fault."""
    return Job.objects.filter(_is_expired()).count()


def find_alarm() -> str:
    """The reason for an alarm: jobs need a reconciler, and none has done a whole pass for ``ALARM_S``.

    Empty when all is well, which takes one query.
    """
    silent = silent_s()
    if silent is not None and silent <= ALARM_S:
        return ""
    is_waiting = claimable() & Q(created_at__lt=from_now(-ALARM_S))
    unfinished = Job.objects.filter(state__in=(State.QUEUED, *LIVE_STATES))
    found = unfinished.aggregate(lost=Count("pk", filter=_is_expired()), waiting=Count("pk", filter=is_waiting))
    if not found["lost"] and not found["waiting"]:
        return ""
    since = "since this service began" if silent is None else f"for {silent / 60:.0f} min"
    return (
        f"The reconciler, which starts lost and waiting jobs again, has not worked {since}. "
        f"Lost jobs: {found['lost']}; waiting jobs: {found['waiting']}. "
        "An administrator starts it with python -m worker.reconciler; its log says what stopped it."
    )


def _is_expired() -> Q:
    return Q(state__in=LIVE_STATES, lease_until__lt=Now())
