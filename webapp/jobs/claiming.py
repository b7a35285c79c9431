"""Claims the next job that a worker's machine can hold, and defines the order of what waits.

``QUEUE_ORDER`` is the one order: claims, the queue that is shown and the reconciler all sort by it. Higher priority first, then
by ``turn``, then older. A turn is given when a job is made: profiles get 0, because planning waits for them; a person's jobs get
one turn each, beginning where the queue stands at present. So people who have many jobs waiting and people who have one take
turns, and nobody waits for all that another has submitted (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, section
2.1, with every job of size one). A turn is a column and not a rank among what waits: ranks move up with each claim, and whose
first job is the oldest would be first again each time.
"""

from collections.abc import Collection, Sequence
from typing import Final

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import Now

from optimizer.base.units import GIB
from optimizer.estimate.sharing import Shares, gains, host_need_bytes, lane_shares, slowdown
from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.models import DEVICE_JOB_KINDS, LIVE_STATES, Attempt, FenceSequence, Job, Kind, State
from webapp.jobs.moves import claimable, move_job

QUEUE_ORDER: Final = ("-priority", "turn", "created_at", "id")
PROFILE_TURN: Final = 0
DESKTOP_BYTES: Final = GIB
"""In use on a card that a screen is connected to, and that nobody calls taken."""
_FIRST_TURN: Final = 1


def claim_job(
    *,
    worker: str,
    machine: Machine,
    job_id: str | None = None,
    kinds: Collection[Kind] = tuple(Kind),
    lease_s: float = 30,
    used_bytes: int | None = None,
    must_gain: bool = False,
) -> Attempt | None:
    """The next job of these kinds that this machine can hold, in ``QUEUE_ORDER``; None when there is none.

    Live jobs on the machine keep the device memory they need. The machine's row is locked, so two claims on one machine
    cannot both take the last free bytes; where the database cannot lock rows (SQLite) its one writer gives the same. The host's
    memory is shared as well: a job does not join others with which it would not fit there, and waits as for more to be done.

    used_bytes: device memory in use at present, from the driver. must_gain: beside jobs that run, take the next one only if
    more is done by all together (``optimizer/estimate/sharing.py``); nothing behind it goes first, so nobody waits for ever.
    """
    with transaction.atomic():
        host = Machine.objects.select_for_update().get(pk=machine.pk)
        if host.draining:
            return None
        if used_bytes is not None:
            host.used_bytes = used_bytes
        fits = Q(need_device_kind__in=("", host.document["device"]["kind"]), need_device_bytes__lte=free_bytes(host))
        candidates = Job.objects.filter(claimable() & fits, kind__in=kinds)
        if job_id is not None:
            candidates = candidates.filter(pk=job_id)
        queue = candidates.order_by(*QUEUE_ORDER).select_for_update(skip_locked=True)
        chosen = queue.only("pk", "kind", "prediction").first()
        if chosen is None:
            return None
        beside = list(_live_on(host).only("pk", "prediction")) if chosen.kind in DEVICE_JOB_KINDS else []
        shares = _shares([*beside, chosen], device_kind=host.document["device"]["kind"])
        if beside and must_gain and not (shares and gains(shares[:-1], shares[-1])):
            return None
        if beside and not _fit_on_host([*beside, chosen], machine=host):
            return None
        job = move_job(
            chosen.pk,
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
            message=_describe_sharing(len(beside), shares),
        )
        if job is None or job.fence is None:
            return None
        if not beside and used_bytes is not None and chosen.kind in DEVICE_JOB_KINDS:
            Machine.objects.filter(pk=host.pk).update(others_bytes=used_bytes)
        Attempt.objects.filter(job__in=beside, fence=F("job__fence")).update(is_shared=True)
        return Attempt.objects.create(
            job=job,
            number=job.attempt,
            fence=job.fence,
            worker=worker,
            machine=host,
            plan=job.plan,
            prediction=job.prediction,
            is_shared=bool(beside),
        )


def next_turn(owner: User | None, *, kind: str) -> int:
    """The turn of a job that its owner submits now. Two that are made at the same moment may share one, and age decides."""
    if kind == Kind.PROFILE:
        return PROFILE_TURN
    # what is paused or awaits its plan does not hold the others' turns back, nor does who was moved
    ordinary = Job.objects.filter(claimable(), priority=0, turn__gte=_FIRST_TURN)
    present = ordinary.order_by("turn", "created_at", "id").values_list("turn", flat=True)[:1]
    last = Job.objects.filter(owner=owner, state=State.QUEUED).order_by("-turn").values_list("turn", flat=True)[:1]
    return max((_FIRST_TURN, *present, *(turn + 1 for turn in last)))


def stands_before(job: Job) -> Q:
    """The condition that another waiting job is claimed earlier than this one."""
    same_turn = Q(priority=job.priority, turn=job.turn)
    return (
        Q(priority__gt=job.priority)
        | Q(priority=job.priority, turn__lt=job.turn)
        | (same_turn & Q(created_at__lt=job.created_at))
        | (same_turn & Q(created_at=job.created_at, id__lt=job.pk))
    )


def free_bytes(machine: Machine) -> int:
    """Device bytes left beside what live jobs on it need, and beside what else is in use there.

    What a card's driver counts is partly theirs. What others held before the first of them began counts beside their needs, which
    they may not have taken yet; beyond it the larger of the two is taken. A desktop and the driver itself are left out, since
    plans leave room for them.
    """
    taken = _live_on(machine).aggregate(taken=Sum("need_device_bytes"))["taken"] or 0
    used = max(0, (machine.used_bytes or 0) - DESKTOP_BYTES)
    others = min(used, max(0, (machine.others_bytes or 0) - DESKTOP_BYTES)) if taken else used
    return int(machine.document["device"]["memory_bytes"]) - max(taken + others, used)


def _live_on(machine: Machine) -> QuerySet[Job]:
    """Jobs that hold the machine's device at present."""
    live = Job.objects.filter(state__in=LIVE_STATES, kind__in=DEVICE_JOB_KINDS)
    return live.filter(attempts__machine=machine, attempts__fence=F("fence"))


def _fit_on_host(jobs: Sequence[Job], *, machine: Machine) -> bool:
    return sum(host_need_bytes(job.prediction) for job in jobs) <= int(machine.document["host_memory_bytes"])


def _shares(jobs: Sequence[Job], *, device_kind: str) -> list[Shares]:
    """The lanes that each job keeps busy; nothing where the prediction of one of them does not say."""
    known = [lane_shares(job.prediction, device_kind=device_kind) for job in jobs]
    return [shares for shares in known if shares is not None] if None not in known else []


def _describe_sharing(num_beside: int, shares: Sequence[Shares]) -> str:
    if not num_beside:
        return ""
    others = f"beside {num_beside} other job{'' if num_beside == 1 else 's'} on the device"
    if not shares:
        return others
    slower = slowdown(shares)
    return f"{others}; {'no slower than alone' if slower < 1.05 else f'about {slower:.1f} times as long as alone'}"


def _next_fence() -> int:
    """Inside the claim's transaction: the row stays locked until the claim commits, so fences grow in commit order."""
    row, _ = FenceSequence.objects.get_or_create(pk=1)
    FenceSequence.objects.filter(pk=row.pk).update(value=F("value") + 1)
    return FenceSequence.objects.get(pk=row.pk).value
