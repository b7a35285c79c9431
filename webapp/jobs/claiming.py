"""Claims the next job that a worker's machine can hold."""

from collections.abc import Collection

from django.db import transaction
from django.db.models import F, Q, Sum
from django.db.models.functions import Now

from webapp.catalog.models import Machine
from webapp.clock import from_now
from webapp.jobs.models import LIVE_STATES, Attempt, FenceSequence, Job, Kind, Outbox, State
from webapp.jobs.moves import claimable, move_job


def claim_job(
    *, worker: str, machine: Machine, job_id: str | None = None, kinds: Collection[Kind] = tuple(Kind), lease_s: float = 30
) -> Attempt | None:
    """The next job of these kinds that this machine can hold, by priority and then age; None when there is none.

    Live jobs on the machine keep the device memory they need. The machine's row is locked, so two claims on one machine
    cannot both take the last free bytes; where the database cannot lock rows (SQLite) its one writer gives the same.
    """
    with transaction.atomic():
        host = Machine.objects.select_for_update().get(pk=machine.pk)
        if host.draining:
            return None
        fits = Q(need_device_kind__in=("", host.document["device"]["kind"]), need_device_bytes__lte=free_bytes(host))
        candidates = Job.objects.filter(claimable() & fits, kind__in=kinds)
        if job_id is not None:
            candidates = candidates.filter(pk=job_id)
        queue = candidates.order_by("-priority", "created_at", "id").select_for_update(skip_locked=True)
        chosen = queue.only("pk").first()
        if chosen is None:
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
        )
        if job is None or job.fence is None:
            return None
        Outbox.objects.filter(job=job).delete()
        return Attempt.objects.create(
            job=job,
            number=job.attempt,
            fence=job.fence,
            worker=worker,
            machine=host,
            plan=job.plan,
            prediction=job.prediction,
        )


def free_bytes(machine: Machine) -> int:
    """Device bytes left beside what live jobs on it need."""
    taken = Job.objects.filter(
        state__in=LIVE_STATES, attempts__machine=machine, attempts__fence=F("fence")
    ).aggregate(taken=Sum("need_device_bytes"))["taken"]
    return int(machine.document["device"]["memory_bytes"]) - (taken or 0)


def _next_fence() -> int:
    """Inside the claim's transaction: the row stays locked until the claim commits, so fences grow in commit order."""
    row, _ = FenceSequence.objects.get_or_create(pk=1)
    FenceSequence.objects.filter(pk=row.pk).update(value=F("value") + 1)
    return FenceSequence.objects.get(pk=row.pk).value
