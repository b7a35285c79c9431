"""The end of an attempt: what its result, or the lack of one, means for the job.

``decide_end`` is pure and says what should happen; ``finish_attempt`` does it in one fenced transaction, with the artifacts and
the measured record. Failure classes: what was done to the job from outside is retried with growing delays (its process killed
while its worker lived: five times; a full disk or a fault of the machine: for as long as it takes; a lost remote store: ten times
in a row without a new checkpoint); out of memory sends it back for another plan
(``memory``); what the job did to itself (bad data, loss not finite) is not retried; three quick deaths of its process without a
step are a poisoned job; a drained or paused attempt costs nothing. A lost worker is judged by ``losses``.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import HeadroomError
from optimizer.profile.fingerprints import traced_fingerprint
from webapp.attempts.losses import Losses, count_losses, is_loss
from webapp.attempts.memory import (
    count_shortages,
    describe_last_shortage,
    describe_shortage,
    may_replan,
    may_take_less_disk,
    was_killed,
)
from webapp.catalog.actions import keep_profile, keep_profile_error
from webapp.catalog.models import Profile
from webapp.clock import from_now
from webapp.jobs.actions import create_job
from webapp.jobs.checkpoints import export_job, ready_export
from webapp.jobs.devices.joined import is_joined
from webapp.jobs.devices.members import describe_loss
from webapp.jobs.models import MEMORY_REASONS, PROBED, Artifact, Attempt, Job, Kind, Member, Reason, State
from webapp.jobs.moves import held_by, move_job
from webapp.jobs.specs.training import read_adapter
from webapp.planning.runs.learning import calibrate, price_generation

logger = logging.getLogger(__name__)

MAX_FAILED_ATTEMPTS = 5
MAX_QUICK_DEATHS = 3
QUICK_DEATH_S = 60
_MAX_DELAY_FACTOR = 36
"""With the default base of 10 s: 10, 20, 40, … and at most 360 s."""
MAX_STORE_LOSSES = 10
"""In a row without a new checkpoint; with the default delays half an hour lies between the first and the last."""
_AWAITED_REASONS = frozenset({Reason.DISK_FULL.value, Reason.MACHINE_FAULT.value, Reason.REMOTE_STORE_LOST.value})
"""Reasons that may pass by themselves; they count against no job."""
_PAUSED = {Kind.TRAIN.value: "paused at a checkpoint", Kind.GENERATE.value: "paused; finished prompts are kept"}
_REPLACED_KIND = "tensorboard"
"""Artifacts of which a job has one, that of its last attempt."""
_STOP_REASONS = frozenset({Reason.MAX_DURATION.value, Reason.NO_PROGRESS.value})
"""Written on the row by the reconciler when it, and not a person, asks for the end."""


@dataclass(frozen=True, kw_only=True)
class End:
    """The effect of an attempt's end on its job."""

    answer: str
    """The answer of ``finish_attempt``: succeeded, failed, cancelled, drained, paused, probed, or the reason of a retry."""
    state: State
    kind: str
    """Kind of the event."""
    reason: str = ""
    message: str = ""
    is_failed_attempt: bool = False
    delay_s: float = 0.0
    is_held: bool = False
    """The job waits until somebody resumes it."""
    awaits_plan: bool = False
    """The job may not start again before another plan was found."""


def finish_attempt(
    attempt: Attempt,
    *,
    result: dict[str, Any] | None,
    exit_code: int | None,
    actor: str | None = None,
    only_if: Q | None = None,
    lost: Member | None = None,
    loss: str | None = None,
) -> str:
    """Apply ``result.json``, or None for a process that left none. ``"stale"``, and nothing changed, when fenced out.

    only_if: a further condition on the row; the reconciler passes "the lease has run out". lost: the part of the attempt that was
    lost, where it was not the whole; else the result may name its machine. loss: what became of the worker, in words.
    """
    profile, generation = _read_profile(attempt), price_generation(attempt, result)
    with _ready_export(attempt) as ready, transaction.atomic():
        condition = held_by(attempt) if only_if is None else held_by(attempt) & only_if
        job = Job.objects.select_for_update(of=("self",)).filter(condition).select_related("model").first()
        if job is None:
            return "stale"
        attempt.refresh_from_db(fields=["is_shared"])  # a job that began later marks those beside it
        lost = lost or _lost_part(attempt, result)
        exit_code = None if lost is not None else exit_code
        is_lost = lost is not None or (result is None and exit_code is None)
        end = decide_end(
            job,
            result=result,
            exit_code=exit_code,
            num_quick_deaths=_num_quick_deaths(attempt),
            num_alike=_num_alike(attempt, result),
            losses=count_losses(attempt, now=timezone.now(), lost=lost) if is_lost else None,
            loss=loss or "the worker was lost" if lost is None else describe_loss(lost),
            has_profile=profile is not None or _has_profile(job),
            num_shortages=count_shortages(attempt),
            is_shared=attempt.is_shared,
            drained_by=_drained_by(attempt) if is_joined(job) else "",
        )
        if end.answer == "failed" and end.reason in MEMORY_REASONS:
            end = replace(end, message=describe_last_shortage(attempt, end.message))
        if not _move(job, end, result=result, condition=condition, actor=actor or f"worker:{attempt.worker}"):
            return "stale"
        _close(attempt, end, result=result, exit_code=exit_code)
        _close_members(attempt, lost=lost)
        _keep_artifacts(job, result)
        if job.kind == Kind.PROFILE:
            _keep_profile(job, end, profile, result)
        elif end.state == State.SUCCEEDED or end.answer == PROBED:
            calibrate(attempt, result, generation=generation)
        if end.state == State.CANCELLED and job.cancel_mode == "save":
            _export_what_was_saved(job, ready)
    return end.answer


@contextmanager
def _ready_export(attempt: Attempt) -> Iterator[dict[str, Any] | None]:
    """Stop and save leaves weights to use, not only a checkpoint: a job of its own writes them, which needs no device.

    None where that was not asked for by now, or there is nothing to export.
    """
    asked = Q(kind=Kind.TRAIN, cancel_requested_at__isnull=False, cancel_mode="save")
    job = Job.objects.filter(held_by(attempt) & asked).select_related("model", "project").first()
    with ExitStack() as stack:
        ready = None
        if job is not None:
            with suppress(HeadroomError):
                ready = stack.enter_context(ready_export(job))
        yield ready


def _export_what_was_saved(job: Job, ready: dict[str, Any] | None) -> None:
    if ready is not None:
        create_job(**ready, owner=job.owner, actor="program")
    elif job.kind == Kind.TRAIN:  # asked for since then, or there is nothing: copied after the commit, never within
        transaction.on_commit(partial(_export_late, job), robust=True)


def _export_late(job: Job) -> None:
    try:
        export_job(job, actor="program")
    except HeadroomError as error:
        logger.warning("nothing of %s is exported: %s", job.pk, error)


def decide_end(
    job: Job,
    *,
    result: dict[str, Any] | None,
    exit_code: int | None,
    num_quick_deaths: int,
    num_alike: int = 0,
    losses: Losses | None = None,
    loss: str = "the worker was lost",
    has_profile: bool = True,
    num_shortages: int = 0,
    is_shared: bool = False,
    drained_by: str = "",
) -> End:
    """num_quick_deaths: how many of the newest attempts in a row, this one included if it died, ended quickly without a step.
    num_alike: how many of those before this one, in a row, ended for the same reason and had begun at the same checkpoint.
    losses: of an attempt that was lost together with its worker, or with that of another machine; loss: which, in words.
    num_shortages: how many attempts before ran out of memory.
    is_shared: other jobs were on the device, so that what its first steps took says nothing of the plan.
    drained_by: machine whose worker was asked to stop, where it is not the one that leads.
    """
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
        if result is not None and result.get("reason") == PROBED and not is_shared:
            message = f"{_message(result, exit_code)}; the plan is looked at again before the rest of the run"
            return End(answer=PROBED, state=State.QUEUED, kind="requeued", message=message, awaits_plan=True)
        is_probed = result is not None and result.get("reason") == PROBED
        asked = f"the worker of {drained_by} was asked to stop" if drained_by else "the worker was asked to stop"
        why = "its first steps shared the device; it goes on with its plan" if is_probed else asked
        return End(answer="drained", state=State.QUEUED, kind="requeued", message=why)
    if losses is not None:
        return _lost(job, losses, loss)
    reason = _known_reason(result) if result else Reason.WORKER_LOST.value
    message = _message(result, exit_code)
    is_killed = was_killed(job, result)
    if result is not None and not is_killed and may_replan(job, reason, num_before=num_shortages):
        message = describe_shortage(result, num_before=num_shortages)
        return End(answer=reason, state=State.QUEUED, kind="requeued", reason=reason, message=message, awaits_plan=True)
    is_given_up = reason == Reason.REMOTE_STORE_LOST and num_alike + 1 >= MAX_STORE_LOSSES
    if reason in _AWAITED_REASONS and not is_given_up:
        end = _await(reason, message, num_alike=num_alike)
        if result is not None and may_take_less_disk(job, result):
            return replace(end, message=f"{message}; a plan that keeps less on the disk is looked for", awaits_plan=True)
        return end
    if is_given_up:
        message = f"{message}; {num_alike + 1} attempts in a row met this without a new checkpoint"
    if reason != Reason.WORKER_LOST and not is_killed:
        return End(answer="failed", state=State.FAILED, kind="failed", reason=reason, message=message, is_failed_attempt=True)
    return _retry(job, reason=reason, message=message, num_quick_deaths=num_quick_deaths)


def _asked_to_stop(job: Job) -> End:
    if job.reason in _STOP_REASONS:
        return End(answer="failed", state=State.FAILED, kind="failed", reason=job.reason, message=job.message)
    return End(answer="cancelled", state=State.CANCELLED, kind="cancelled", reason=Reason.CANCELLED_BY_USER)


def _await(reason: str, message: str, *, num_alike: int) -> End:
    """Try again, ever more seldom, until what failed works again or somebody cancels the job."""
    delay_s = _delay_s(num_alike)
    return End(answer=reason, state=State.QUEUED, kind="requeued", reason=reason, message=message, delay_s=delay_s)


def _lost(job: Job, losses: Losses, message: str) -> End:
    reason, num = Reason.WORKER_LOST.value, losses.num_in_a_row
    in_a_row = f"{message}, for the {num}th time in a row without a new checkpoint" if num > 3 else message
    match losses.verdict:
        case "fail":
            blamed = f"{message} {num} times in a row without a new checkpoint, while other jobs ended well on the same machine"
            return End(answer="failed", state=State.FAILED, kind="failed", reason=reason, message=blamed)
        case "hold" if job.kind == Kind.PROFILE:
            # nobody sees it, and so nobody could resume it; with an error it is asked for again
            return End(answer="failed", state=State.FAILED, kind="failed", reason=reason, message=in_a_row)
        case "hold":
            held = f"{in_a_row}; the job is paused until somebody resumes it"
            return End(answer=reason, state=State.QUEUED, kind="paused", reason=reason, message=held, is_held=True)
    # The first time at once: mostly it was waited for already, until the lease ran out, and what is left may take it.
    delay_s = _delay_s(num - 2) if num > 1 else 0.0
    return End(answer=reason, state=State.QUEUED, kind="requeued", reason=reason, message=in_a_row, delay_s=delay_s)


def _delay_s(num_before: int) -> float:
    return float(settings.HEADROOM_RETRY_BASE_S * min(2 ** min(num_before, 10), _MAX_DELAY_FACTOR))


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
    # A job that worked until its process was killed, or its link was cut, may go on at once; this happens once, so it is no loop.
    is_first = reason == Reason.WORKER_LOST and num_failed == 1 and num_quick_deaths == 0
    return End(
        answer=reason,
        state=State.QUEUED,
        kind="requeued",
        reason=reason,
        message=message,
        is_failed_attempt=True,
        delay_s=0.0 if is_first else _delay_s(job.failed_attempts),
    )


def _known_reason(result: dict[str, Any]) -> str:
    reason = str(result.get("reason") or "")
    return reason if reason in Reason.values and reason != Reason.DONE else Reason.INTERNAL.value


def _message(result: dict[str, Any] | None, exit_code: int | None) -> str:
    if result is not None:
        return str(result.get("message") or "")
    if exit_code is None:
        return ""
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
        if previous.outcome != Reason.WORKER_LOST or is_loss(previous) or previous.made_progress or not quick:
            break
        count += 1
    return count


def _num_alike(attempt: Attempt, result: dict[str, Any] | None) -> int:
    attempt.refresh_from_db(fields=["resumed_from_step"])
    end = (_known_reason(result) if result else "", attempt.resumed_from_step)
    earlier = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).order_by("-number")
    ends = earlier.values_list("outcome", "resumed_from_step")[:_MAX_DELAY_FACTOR]
    return len(list(takewhile(lambda each: each == end, ends)))


def _move(job: Job, end: End, *, result: dict[str, Any] | None, condition: Q, actor: str) -> bool:
    changes: dict[str, Any] = {
        "state": end.state,
        "reason": end.reason,
        "message": end.message,
        "error": result.get("error") if result and not end.awaits_plan else None,
        "awaits_plan": end.awaits_plan,
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
        changes |= {"pause_requested_at": Now()} if end.is_held else {}
    else:
        changes["finished_at"] = Now()
    moved = move_job(
        job.pk, when=condition, changes=changes, kind=end.kind, actor=actor, reason=end.reason, message=end.message
    )
    return moved is not None


def _summary(result: dict[str, Any] | None) -> dict[str, Any]:
    """The runner's summary and what was measured, flat; a number that is missing overwrites nothing."""
    if not result:
        return {}
    peaks = ("device_peak_bytes", "rank_peak_bytes", "host_peak_bytes")
    shown = (*peaks, "step_ms", "tokens_per_s", "total_s", "prefill_ms", "decode_ms")
    measured = {key: value for key, value in (result.get("measured") or {}).items() if key in shown}
    merged = {**measured, **(result.get("summary") or {})}
    return {key: value for key, value in merged.items() if value is not None and value != []}


def _close(attempt: Attempt, end: End, *, result: dict[str, Any] | None, exit_code: int | None) -> None:
    attempt.outcome = end.reason if end.answer == "failed" else end.answer
    attempt.exit_code = exit_code
    attempt.measured = result.get("measured") if result else None
    attempt.error = result.get("error") if result else None
    attempt.ended_at = timezone.now()
    attempt.save(update_fields=["outcome", "exit_code", "measured", "error", "ended_at"])


def _close_members(attempt: Attempt, *, lost: Member | None) -> None:
    """Parts that no worker took need no end of their own, nor does a lost one: its lease is over, and with it its processes."""
    parts = Member.objects.filter(attempt=attempt, ended_at__isnull=True)
    parts.filter(worker="").update(ended_at=Now())
    if lost is not None:
        Member.objects.filter(pk=lost.pk).update(is_lost=True, trouble=lost.trouble)


def _lost_part(attempt: Attempt, result: dict[str, Any] | None) -> Member | None:
    """The part whose machine the result names as lost, with what the result says of it."""
    name = (result or {}).get("lost_machine")
    part = Member.objects.filter(attempt=attempt, machine_name=name).first() if isinstance(name, str) else None
    if part is not None and not part.trouble:
        part.trouble = str((result or {}).get("trouble") or "")[:200]
    return part


def _drained_by(attempt: Attempt) -> str:
    draining = Member.objects.filter(attempt=attempt, is_draining=True)
    return str(draining.values_list("machine_name", flat=True).first() or "")


def _keep_artifacts(job: Job, result: dict[str, Any] | None) -> None:
    """Only files inside the job's own folder: the runner is not trusted with paths."""
    home = Path(settings.HEADROOM_HOME)
    folder = (home / "jobs" / job.pk).resolve()
    for entry in (result or {}).get("artifacts") or []:
        path = _artifact_path(folder, str(entry["file"]))
        if path is None:
            logger.warning("artifact %r of %s is not a file of the job; not kept", entry["file"], job.pk)
            continue
        if entry["kind"] == _REPLACED_KIND:
            _remove_earlier(job, kind=_REPLACED_KIND, name=entry["name"])
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


def _remove_earlier(job: Job, *, kind: str, name: str) -> None:
    """Take away rows and files that the one of this name replaces; files only once the rows are gone for good."""
    for artifact in Artifact.objects.filter(job=job, kind=kind).exclude(name=name):
        file = Path(settings.HEADROOM_HOME) / artifact.file
        artifact.delete()
        transaction.on_commit(partial(file.unlink, missing_ok=True), robust=True)


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
        compiled=job.spec.get("compiled", ()),
        sharing=job.spec.get("sharing", 1),
    )


def _keep_profile(job: Job, end: End, profile: dict[str, Any] | None, result: dict[str, Any] | None) -> None:
    if end.state == State.SUCCEEDED and profile is not None:
        keep_profile(_fingerprint(job), profile)
    elif end.state in (State.FAILED, State.CANCELLED):
        error = (result or {}).get("error") or {"code": end.reason, "message": end.message, "hint": "", "fields": {}}
        keep_profile_error(_fingerprint(job), error)
