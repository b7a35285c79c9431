"""The end of an attempt: what its result, or the lack of one, means for the job.

``decide_end`` is pure and says what should happen; ``finish_attempt`` does it in one fenced transaction, with the artifacts and
the measured record. Failure classes (DESIGN.md, job states): what the machine did to the job (lost worker, full disk) is retried
with growing delays; what the job did to itself (out of memory, bad data, loss not finite) is not; three quick deaths without
a step are a poisoned job; a drained or paused attempt costs nothing.
"""

import json
import logging
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import HeadroomError
from optimizer.profile.fingerprints import traced_fingerprint
from webapp.catalog.actions import keep_profile, keep_profile_error
from webapp.catalog.models import Profile
from webapp.clock import from_now
from webapp.jobs.checkpoints import export_job
from webapp.jobs.models import Artifact, Attempt, Job, Kind, Outbox, Reason, State
from webapp.jobs.moves import held_by, move_job
from webapp.jobs.specs.training import read_adapter
from webapp.planning.runs.learning import calibrate, price_generation

logger = logging.getLogger(__name__)

MAX_FAILED_ATTEMPTS = 5
MAX_QUICK_DEATHS = 3
QUICK_DEATH_S = 60
_MAX_DELAY_FACTOR = 36
"""With the default base of 10 s: 10, 20, 40, … and at most 360 s."""
_RETRIED_REASONS = frozenset({Reason.WORKER_LOST.value, Reason.DISK_FULL.value})
_PAUSED = {Kind.TRAIN.value: "paused at a checkpoint", Kind.GENERATE.value: "paused; finished prompts are kept"}
_STOP_REASONS = frozenset({Reason.MAX_DURATION.value, Reason.NO_PROGRESS.value})
"""Written on the row by the reconciler when it, and not a person, asks for the end."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The effect of an attempt's end on its job."""

    answer: str
    """The answer of ``finish_attempt``: succeeded, failed, cancelled, drained, paused, worker_lost, disk_full."""
    state: State
    kind: str
    """Kind of the event."""
    reason: str = ""
    message: str = ""
    is_failed_attempt: bool = False
    delay_s: float = 0.0


def finish_attempt(
    attempt: Attempt,
    *,
    result: dict[str, Any] | None,
    exit_code: int | None,
    actor: str | None = None,
    only_if: Q | None = None,
) -> str:
    """Apply ``result.json``, or None for a process that left none. ``"stale"``, and nothing changed, when fenced out.

    only_if: a further condition on the row; the reconciler passes "the lease has run out".
    """
    profile, generation = _read_profile(attempt), price_generation(attempt, result)
    with transaction.atomic():
        condition = held_by(attempt) if only_if is None else held_by(attempt) & only_if
        job = Job.objects.select_for_update(of=("self",)).filter(condition).select_related("model").first()
        if job is None:
            return "stale"
        end = decide_end(
            job,
            result=result,
            exit_code=exit_code,
            num_quick_deaths=_num_quick_deaths(attempt),
            has_profile=profile is not None or _has_profile(job),
        )
        if not _move(job, end, result=result, condition=condition, actor=actor or f"worker:{attempt.worker}"):
            return "stale"
        _close(attempt, end, result=result, exit_code=exit_code)
        _keep_artifacts(job, result)
        if job.kind == Kind.PROFILE:
            _keep_profile(job, end, profile, result)
        elif end.state == State.SUCCEEDED:
            calibrate(attempt, result, generation=generation)
        if end.state == State.CANCELLED and job.cancel_mode == "save":
            _export_what_was_saved(job)
    return end.answer


def _export_what_was_saved(job: Job) -> None:
    """Stop and save leaves weights to use, not only a checkpoint: a job of its own writes them, which needs no device."""
    if job.kind != Kind.TRAIN:
        return
    try:
        with transaction.atomic():
            export_job(job, actor="program")
    except HeadroomError as error:
        logger.warning("nothing of %s is exported: %s", job.pk, error)


def decide_end(
    job: Job,
    *,
    result: dict[str, Any] | None,
    exit_code: int | None,
    num_quick_deaths: int,
    has_profile: bool = True,
) -> End:
    """num_quick_deaths: how many of the newest attempts in a row, this one included if it died, ended quickly without a step."""
    outcome = result["outcome"] if result else "died"
    if outcome == "succeeded" and job.kind == Kind.PROFILE and not has_profile:
        return End(
            answer="failed", state=State.FAILED, kind="failed", reason=Reason.INTERNAL, message="no profile was written"
        )
    if outcome == "succeeded" and not (job.cancel_requested_at and job.cancel_mode == "discard"):
        return End(
            answer="succeeded",
            state=State.SUCCEEDED,
            kind="succeeded",
            reason=Reason.DONE,
            message=_message(result, exit_code),
        )
    if job.cancel_requested_at is not None:
        return _asked_to_stop(job)
    if outcome == "drained":
        if job.pause_requested_at is not None:
            return End(answer="paused", state=State.QUEUED, kind="requeued", message=_PAUSED.get(job.kind, "paused"))
        return End(answer="drained", state=State.QUEUED, kind="requeued", message="the worker was asked to stop")
    reason = _known_reason(result) if result else Reason.WORKER_LOST.value
    message = _message(result, exit_code)
    if reason not in _RETRIED_REASONS:
        return End(answer="failed", state=State.FAILED, kind="failed", reason=reason, message=message, is_failed_attempt=True)
    return _retry(job, reason=reason, message=message, num_quick_deaths=num_quick_deaths)


def _asked_to_stop(job: Job) -> End:
    if job.reason in _STOP_REASONS:
        return End(answer="failed", state=State.FAILED, kind="failed", reason=job.reason, message=job.message)
    return End(answer="cancelled", state=State.CANCELLED, kind="cancelled", reason=Reason.CANCELLED_BY_USER)


def _retry(job: Job, *, reason: str, message: str, num_quick_deaths: int) -> End:
    num_failed = job.failed_attempts + 1
    given_up = ""
    if num_quick_deaths >= MAX_QUICK_DEATHS:
        given_up = f"{num_quick_deaths} attempts died within {QUICK_DEATH_S} s without a step"
    elif num_failed >= MAX_FAILED_ATTEMPTS:
        given_up = f"{num_failed} attempts failed; {MAX_FAILED_ATTEMPTS} are allowed"
    if given_up:
        full = f"{message}; {given_up}"
        return End(answer="failed", state=State.FAILED, kind="failed", reason=reason, message=full, is_failed_attempt=True)
    factor = min(2**job.failed_attempts, _MAX_DELAY_FACTOR)
    return End(
        answer=reason,
        state=State.QUEUED,
        kind="requeued",
        reason=reason,
        message=message,
        is_failed_attempt=True,
        delay_s=settings.HEADROOM_RETRY_BASE_S * factor,
    )


def _known_reason(result: dict[str, Any]) -> str:
    reason = str(result.get("reason") or "")
    return reason if reason in Reason.values and reason != Reason.DONE else Reason.INTERNAL.value


def _message(result: dict[str, Any] | None, exit_code: int | None) -> str:
    if result is not None:
        return str(result.get("message") or "")
    if exit_code is None:
        return "the worker was lost"
    how = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return f"the job's process {how} and left no result"


def _num_quick_deaths(attempt: Attempt) -> int:
    """Counted as if the present attempt had just died."""
    attempt.refresh_from_db(fields=["made_progress", "started_at"])
    if attempt.made_progress or timezone.now() - attempt.started_at > timedelta(seconds=QUICK_DEATH_S):
        return 0
    earlier = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).order_by("-number")
    count = 1
    for previous in earlier[: MAX_QUICK_DEATHS - 1]:
        lived = previous.ended_at - previous.started_at if previous.ended_at else None
        quick = lived is not None and lived <= timedelta(seconds=QUICK_DEATH_S)
        if previous.outcome != Reason.WORKER_LOST or previous.made_progress or not quick:
            break
        count += 1
    return count


def _move(job: Job, end: End, *, result: dict[str, Any] | None, condition: Q, actor: str) -> bool:
    changes: dict[str, Any] = {
        "state": end.state,
        "reason": end.reason,
        "message": end.message,
        "error": result.get("error") if result else None,
        "lease_until": None,
        "eta_s": None,
        "phase": "",
        "summary": {**job.summary, **_summary(result)},
    }
    if result and isinstance(result.get("step"), int) and end.state in (State.SUCCEEDED, State.FAILED, State.CANCELLED):
        changes["step"] = result["step"]
    if end.is_failed_attempt:
        changes["failed_attempts"] = F("failed_attempts") + 1
    if end.state == State.QUEUED:
        changes["not_before"] = from_now(end.delay_s) if end.delay_s else None
        changes["worker"] = ""
        changes["hinted_at"] = None
        Outbox.objects.create(job=job)
    else:
        changes["finished_at"] = Now()
        Outbox.objects.filter(job=job).delete()
    moved = move_job(
        job.pk, when=condition, changes=changes, kind=end.kind, actor=actor, reason=end.reason, message=end.message
    )
    return moved is not None


def _summary(result: dict[str, Any] | None) -> dict[str, Any]:
    """The runner's summary and what was measured, flat; a number that is missing overwrites nothing."""
    if not result:
        return {}
    shown = ("device_peak_bytes", "step_ms", "host_peak_bytes", "tokens_per_s", "total_s", "prefill_ms", "decode_ms")
    measured = {key: value for key, value in (result.get("measured") or {}).items() if key in shown}
    merged = {**measured, **(result.get("summary") or {})}
    return {key: value for key, value in merged.items() if value is not None}


def _close(attempt: Attempt, end: End, *, result: dict[str, Any] | None, exit_code: int | None) -> None:
    attempt.outcome = end.reason if end.answer == "failed" else end.answer
    attempt.exit_code = exit_code
    attempt.measured = result.get("measured") if result else None
    attempt.error = result.get("error") if result else None
    attempt.ended_at = timezone.now()
    attempt.save(update_fields=["outcome", "exit_code", "measured", "error", "ended_at"])


def _keep_artifacts(job: Job, result: dict[str, Any] | None) -> None:
    """Only files inside the job's own folder: the runner is not trusted with paths."""
    home = Path(settings.HEADROOM_HOME)
    folder = (home / "jobs" / job.pk).resolve()
    for entry in (result or {}).get("artifacts") or []:
        path = _artifact_path(folder, str(entry["file"]))
        if path is None:
            logger.warning("artifact %r of %s is not a file of the job; not kept", entry["file"], job.pk)
            continue
        Artifact.objects.update_or_create(
            job=job,
            kind=str(entry["kind"])[:20],
            name=str(entry["name"])[:200],
            defaults={
                "file": str(path.relative_to(home.resolve())),
                "num_bytes": entry["num_bytes"],
                "sha256": entry["sha256"],
            },
        )


def _artifact_path(folder: Path, file: str) -> Path | None:
    for base in (folder, folder / "artifacts"):
        path = (base / file).resolve()
        if path.is_relative_to(folder) and path.is_file():
            return path
    return None


def _read_profile(attempt: Attempt) -> dict[str, Any] | None:
    """``profile.json`` of a profiling attempt, read before the transaction begins."""
    folder = Path(settings.HEADROOM_HOME) / "jobs" / attempt.job_id / "attempts" / str(attempt.number)
    try:
        document = json.loads((folder / "profile.json").read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _has_profile(job: Job) -> bool:
    return Profile.objects.filter(fingerprint=_fingerprint(job), document__isnull=False).exists()


def _fingerprint(job: Job) -> str:
    """Fingerprint of the model that a profile job traces."""
    adapter = read_adapter(job.spec.get("adapter"))
    return traced_fingerprint(
        job.model.fingerprint,
        adapter=adapter,
        generates=bool(job.spec.get("generates")),
        is_packed=bool(job.spec.get("packed")),
        objective=job.spec.get("objective", "next_token"),
    )


def _keep_profile(job: Job, end: End, profile: dict[str, Any] | None, result: dict[str, Any] | None) -> None:
    if end.state == State.SUCCEEDED and profile is not None:
        keep_profile(_fingerprint(job), profile)
    elif end.state in (State.FAILED, State.CANCELLED):
        error = (result or {}).get("error") or {"code": end.reason, "message": end.message, "hint": "", "fields": {}}
        keep_profile_error(_fingerprint(job), error)
