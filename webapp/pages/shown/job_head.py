"""The head of the job page from one job row: state in words, what may be done now, and how it ended.

Pure but for the clock of the page; reads the row and documents that it is given, never the database.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils import timezone

from optimizer.base.units import format_bytes, format_duration
from webapp.jobs.models import LIVE_STATES, Job, Kind, State
from webapp.jobs.queue import between_plans, why_it_waits
from webapp.jobs.specs.mirrors import TITLES
from webapp.pages.presentation import StackedBar, clock_words, eta_words, signed_error, stacked_bar
from webapp.pages.shown.next_steps import NAMES, NextStep, edit_url, next_steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a job, cause first."""

    name: str
    """Name of the failure."""
    cause: str
    """In one sentence."""
    hint: str
    tone: str
    """CSS class: good-end, quiet, or empty for a failure."""
    failed: bool
    bar: StackedBar | None
    tier: str
    kept: str
    """The rest of the work, as a sentence."""
    steps: tuple[NextStep, ...]
    """Steps to take after a failure, the likeliest to help first."""


@dataclass(frozen=True, kw_only=True)
class MirrorState:
    """State of the run's copy at another service."""

    title: str
    url: str
    trouble: str
    """Why it is not up to date; empty where it is."""


@dataclass(frozen=True, kw_only=True)
class JobHead:
    """Values that the head shows beside the row itself."""

    state_words: str
    waiting: str
    eta: str
    budget_bytes: int | None
    peak: str
    peak_error: str
    can_stop: bool
    stop_asked: bool
    can_pause: bool
    can_resume: bool
    can_retry: bool
    took: str
    """Time from its start to its end, or to now; empty before it starts."""
    edit_url: str
    """The form for a new job, filled from this one."""
    stop_loses: str
    outcome: Outcome | None
    mirrors: tuple[MirrorState, ...]
    """Services that the run is copied to."""


def describe_job(job: Job, *, last_checkpoint_step: int | None, shows_queue: bool = False) -> JobHead:
    """shows_queue: says of a job that waits what else is in the queue and on the machines, which not everybody may know."""
    paused, stop_asked = job.pause_requested_at is not None, job.cancel_requested_at is not None
    peak_bytes = job.summary.get("device_peak_bytes")
    prediction: Mapping[str, Any] = job.prediction or {}
    predicted_bytes = prediction.get("device_peak_bytes")
    return JobHead(
        state_words=state_words(job),
        waiting=waiting_words(job, shows_queue=shows_queue),
        eta=eta_words(job.eta_s, state=job.state),
        budget_bytes=budget_bytes(job),
        peak=format_bytes(peak_bytes) if peak_bytes else "–",
        peak_error=signed_error(predicted_bytes, measured=peak_bytes) if predicted_bytes else "",
        can_stop=not job.is_terminal,
        stop_asked=stop_asked,
        can_pause=not job.is_terminal and not paused and not stop_asked,
        can_resume=not job.is_terminal and paused,
        can_retry=job.state == State.CANCELLED,
        took=_took(job),
        edit_url=edit_url(job),
        stop_loses=_stop_loses(job, last_checkpoint_step),
        outcome=_outcome(job, last_checkpoint_step) if job.is_terminal else None,
        mirrors=_mirrors(job),
    )


def _mirrors(job: Job) -> tuple[MirrorState, ...]:
    """In the order of the spec; those that have said nothing yet are left out."""
    known = job.summary.get("mirrors", {})
    return tuple(
        MirrorState(title=TITLES.get(name, name), url=known[name]["url"], trouble=_sentence(known[name]["trouble"]))
        for name in job.spec.get("mirrors", ())
        if name in known
    )


def _sentence(text: str) -> str:
    return f"{text}." if text and text[-1] not in ".…" else text


def budget_bytes(job: Job) -> int | None:
    """Bytes that a device may take; where devices differ, the one with the least room left."""
    ranks = (job.prediction or {}).get("ranks") or []
    left = [rank["memory_bytes"] - rank["peak_high_bytes"] for rank in ranks]
    return rank_budgets(job)[left.index(min(left))] if left else _goal_bytes(job)


def rank_budgets(job: Job) -> list[int]:
    """By rank, what it may take of a device that differs from others: no more than there is; empty where all are alike."""
    sizes = [int(rank["memory_bytes"]) for rank in (job.prediction or {}).get("ranks") or []]
    wanted = _goal_bytes(job)
    return [size if wanted is None else min(size, wanted) for size in sizes]


def _goal_bytes(job: Job) -> int | None:
    found: int | None = job.spec.get("goal", {}).get("device_budget_bytes")
    return found


def state_words(job: Job) -> str:
    """The state, and the request that is not yet fulfilled."""
    if job.is_terminal:
        return job.state
    if job.cancel_requested_at is not None:
        return "stopping"
    if job.pause_requested_at is not None:
        return "paused" if job.state == State.QUEUED else "pausing"
    return job.state


def waiting_words(job: Job, *, shows_queue: bool) -> str:
    """The reason why a job waits, and since when."""
    if job.state == State.QUEUED and job.pause_requested_at is None:
        if job.awaits_plan and job.attempt:
            return between_plans(job)
        if job.awaits_plan:
            return f"Waiting for the model's profile since {_since(job)}; it then starts by itself with the plan chosen for it."
        retry = f" after attempt {job.attempt}" if job.attempt else ""
        if shows_queue:
            return f"{why_it_waits(job)} Queued{retry} since {_since(job)}."
        return f"Waiting for a worker{retry} since {_since(job)}."
    if job.state == State.QUEUED:
        kept = f" It continues at its last checkpoint, about step {job.step}." if job.step else ""
        if job.kind == Kind.GENERATE:
            kept = " Finished prompts are kept." if job.step else ""
        return f"Paused: it may not start until it is resumed.{kept}"
    if job.state in LIVE_STATES and job.cancel_requested_at is not None:
        saves = "Stopping: the worker ends the step at hand and saves."
        if job.kind == Kind.SERVE:
            return "Being taken down: answers on their way end with an error."
        if job.kind == Kind.GENERATE:
            saves = "Stopping: the worker ends the pass at hand and writes the results."
        return "Stopping now." if job.cancel_mode == "discard" else saves
    if job.state == State.STARTING:
        return f"Worker {job.worker} has claimed it; its process is starting."
    return ""


def _took(job: Job) -> str:
    if job.started_at is None:
        return ""
    return format_duration(max(0.0, ((job.finished_at or timezone.now()) - job.started_at).total_seconds()))


def _since(job: Job) -> str:
    """The moment, not the time that has passed: a page that is not fetched again would show the same seconds for ever."""
    return clock_words(job.created_at if not job.attempt else (job.progress_at or job.created_at))


def _stop_loses(job: Job, last_checkpoint_step: int | None) -> str:
    if job.kind == Kind.GENERATE:
        return "The prompts of the pass at hand would be lost, and no file of results is written; finished lines stay readable."
    if not job.step:
        return "Nothing has been trained yet; the job ends without files."
    if last_checkpoint_step is None:
        return f"All {job.step} steps would be lost: there is no checkpoint yet."
    lost = max(0, job.step - last_checkpoint_step)
    steps = "1 step" if lost == 1 else f"{lost} steps"
    return f"About {steps} since the checkpoint at step {last_checkpoint_step} would be lost, and no weights are exported."


def _outcome(job: Job, last_checkpoint_step: int | None) -> Outcome | None:
    error = job.error or {}
    fields = error.get("fields", {})
    sizes = fields.get("bytes_by_category") or {}
    failed = job.state == State.FAILED
    name = NAMES.get(job.reason, job.reason)
    cause = job.message or error.get("message") or f"{name}."
    kept = ""
    if job.state != State.SUCCEEDED and last_checkpoint_step is not None:
        kept = f"The checkpoint at step {last_checkpoint_step} is kept."
    return Outcome(
        name=name if failed else "",
        cause=cause[:1].upper() + cause[1:],
        hint=error.get("hint", "") if failed else "",
        tone="" if failed else "good-end" if job.state == State.SUCCEEDED else "quiet",
        failed=failed,
        bar=_bar_at_failure(fields) if failed and sizes else None,
        tier=fields.get("tier", "device"),
        kept=kept,
        steps=next_steps(job, has_checkpoint=last_checkpoint_step is not None) if failed else (),
    )


def _bar_at_failure(fields: Mapping[str, Any]) -> StackedBar:
    """Bytes that were in memory, and on top of them the request that did not fit."""
    sizes = dict(fields["bytes_by_category"])
    if requested_bytes := fields.get("requested_bytes"):
        sizes["more_requested"] = requested_bytes
    return stacked_bar(sizes, budget_bytes=fields.get("budget_bytes"))
