"""Records what an attempt's supervisor sees: its start, lease, phases, progress, samples, checkpoints and copies elsewhere.

An answer of False, or a lease that is not held, says that the attempt's fence is no longer the job's: it must stop and write
nothing more. How attempts end is in ``outcome.py``.
"""

from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import Case, F, Q, When
from django.db.models.functions import Coalesce, Now

from webapp.clock import from_now
from webapp.jobs.devices.joined import is_joined
from webapp.jobs.devices.members import drains
from webapp.jobs.models import Attempt, Checkpoint, Job, Sample, State
from webapp.jobs.moves import held_by, move_job
from webapp.wire.publish import publish

_STOPS = {"": "", "save": "save", "keep": "save", "discard": "discard"}
"""Ways for a supervisor to stop: exporting comes after it."""


@dataclass(frozen=True, kw_only=True)
class LeaseAnswer:
    """The answer to a supervisor that renews its lease."""

    held: bool
    """False: fenced out. Kill the child, write nothing more."""
    cancel_mode: str
    """Empty, ``save`` (stop at a checkpoint, as for ``keep``) or ``discard`` (stop now)."""
    pause_requested: bool
    drains: bool = False
    """A member's worker was asked to stop, and the attempt ends at a checkpoint."""


def record_started(attempt: Attempt, *, pid: int, resumed_from_step: int = 0) -> bool:
    """The runner's process exists: starting -> running. False when fenced out."""
    with transaction.atomic():
        job = move_job(
            attempt.job_id,
            when=held_by(attempt) & Q(state=State.STARTING),
            changes={"state": State.RUNNING, "started_at": Coalesce(F("started_at"), Now()), "progress_at": Now()},
            kind="started",
            actor=f"worker:{attempt.worker}",
        )
        if job is None:
            return False
        attempt.pid, attempt.resumed_from_step = pid, resumed_from_step
        attempt.save(update_fields=["pid", "resumed_from_step"])
    return True


def renew_lease(attempt: Attempt, *, lease_s: float = 30) -> LeaseAnswer:
    """Extend the lease and read what people asked for. A late renewal holds as long as nobody else has claimed."""
    if not Job.objects.filter(held_by(attempt)).update(lease_until=from_now(lease_s)):
        return LeaseAnswer(held=False, cancel_mode="", pause_requested=False)
    asked = Job.objects.filter(held_by(attempt)).values("cancel_requested_at", "cancel_mode", "pause_requested_at").first()
    if asked is None:
        return LeaseAnswer(held=False, cancel_mode="", pause_requested=False)
    return LeaseAnswer(
        held=True,
        cancel_mode=_STOPS[asked["cancel_mode"]] if asked["cancel_requested_at"] else "",
        pause_requested=asked["pause_requested_at"] is not None,
        drains=is_joined(attempt.job) and drains(attempt),
    )


def record_phase(attempt: Attempt, phase: str, message: str = "") -> bool:
    """A new phase is an event and counts as progress; the same phase again changes nothing."""
    moved = move_job(
        attempt.job_id,
        when=held_by(attempt) & ~Q(phase=phase),
        changes={"phase": phase[:40], "progress_at": Now()},
        kind="phase",
        actor=f"worker:{attempt.worker}",
        message=f"{phase}: {message}" if message else phase,
    )
    return moved is not None or Job.objects.filter(held_by(attempt)).exists()


def record_progress(
    attempt: Attempt, *, step: int, eta_s: float | None, summary: dict[str, Any], num_tokens: int = 0
) -> bool:
    """Latest numbers onto the row; ``summary`` is merged into what is there. No event: samples show it.

    num_tokens: that a generate job has written. A pass of many prompts may take long until the first of them is done; more tokens
    are progress too.
    """
    is_first = step > attempt.resumed_from_step and not attempt.made_progress
    with transaction.atomic():
        # the one column, because the others are large and this comes every other second
        known = Job.objects.select_for_update().filter(held_by(attempt)).values_list("summary", flat=True).order_by("pk").first()
        if known is None:
            return False
        writes = num_tokens > int(known.get("num_tokens") or 0)
        Job.objects.filter(held_by(attempt)).update(
            step=step,
            eta_s=eta_s,
            summary={**known, **summary, **({"num_tokens": num_tokens} if num_tokens else {})},
            progress_at=Now() if writes else Case(When(~Q(step=step), then=Now()), default=F("progress_at")),
        )
        if is_first:
            Attempt.objects.filter(pk=attempt.pk).update(made_progress=True)
    if is_first:
        attempt.made_progress = True
    return True


def record_samples(attempt: Attempt, records: list[dict[str, Any]]) -> bool:
    """Telemetry records as the runner wrote them; a copy that comes twice is kept once.

    A record that names its attempt is kept under that one: what an earlier attempt measured and its killed supervisor did not
    get to write is written by the next.
    """
    rows = [Sample.of_record(record, job_id=attempt.job_id, attempt=attempt.number) for record in records]
    with transaction.atomic():
        if not Job.objects.select_for_update().filter(held_by(attempt)).exists():
            return False
        Sample.objects.bulk_create(rows, ignore_conflicts=True, batch_size=500)
    return True


def record_checkpoint(attempt: Attempt, *, step: int, folder: str, manifest_sha256: str, num_bytes: int) -> bool:
    """A resumable checkpoint, under the fence that wrote it; the same folder again changes nothing."""
    with transaction.atomic():
        if not Job.objects.select_for_update().filter(held_by(attempt)).exists():
            return False
        _, created = Checkpoint.objects.get_or_create(
            job_id=attempt.job_id,
            folder=folder,
            defaults={
                "step": step,
                "fence": attempt.fence,
                "manifest_sha256": manifest_sha256,
                "num_bytes": num_bytes,
            },
        )
        if not created:
            return True
        move_job(
            attempt.job_id,
            when=held_by(attempt),
            changes={"progress_at": Now()},
            kind="checkpointed",
            actor=f"worker:{attempt.worker}",
            message=f"step {step}",
        )
        document = {"step": step, "folder": folder, "manifest_sha256": manifest_sha256, "num_bytes": num_bytes}
        transaction.on_commit(lambda: publish(attempt.job_id, "checkpoint", document) and None, robust=True)
    return True


def record_mirror(attempt: Attempt, *, name: str, url: str, trouble: str) -> None:
    """Keep how the copy of a run at another service is doing, also after the attempt's end, until the next one begins, whose own
    mirror has the word from then on; a new trouble is an event.
    """
    with transaction.atomic():
        own = Q(pk=attempt.job_id, fence=attempt.fence)
        job = Job.objects.select_for_update(of=("self",)).filter(own).first()
        if job is None:
            return
        mirrors = job.summary.get("mirrors", {})
        known = mirrors.get(name, {})
        status = {"url": url if url.startswith(("https://", "http://")) else "", "trouble": trouble}
        if status == known:
            return
        summary = {**job.summary, "mirrors": {**mirrors, name: status}}
        if not trouble or trouble == known.get("trouble"):
            Job.objects.filter(own).update(summary=summary)
            return
        move_job(job.pk, when=own, changes={"summary": summary}, kind="mirror_failed", actor=name, message=trouble)
