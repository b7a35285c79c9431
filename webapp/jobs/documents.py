"""Jobs as JSON, one spelling for the API, the stream and the pages. Every key is listed; nothing leaks by default."""

from collections.abc import Iterable
from typing import Any

from django.db.models import QuerySet

from optimizer.estimate.job.causes import describe_cause
from optimizer.plan.explain.diff import describe_change
from optimizer.plan.plan import Plan
from webapp.clock import iso
from webapp.jobs.models import MEMORY_REASONS, Artifact, Attempt, Checkpoint, Event, Job, Kind, Member

FOLDER_KINDS = ("model", "adapter", "gguf")
"""Kinds of artifacts that are a folder's files."""


def job_document(job: Job) -> dict[str, Any]:
    """A job as ``GET /api/v1/jobs/{id}`` shows it. Select ``machine`` with it, or pay one query."""
    return {
        **state_document(job),
        "project": job.project_id,
        "spec": job.spec,
        "plan": job.plan,
        "prediction": job.prediction,
        "machine": job.machine.name if job.machine else None,
        "links": _links(job.pk, job.kind),
    }


def job_row_document(job: Job) -> dict[str, Any]:
    """A job as lists show it: without its spec, plan and prediction, which are most of it and stand under ``links.self``."""
    return {
        **state_document(job),
        "project": job.project_id,
        "machine": job.machine.name if job.machine else None,
        "links": _links(job.pk, job.kind),
    }


def state_document(job: Job) -> dict[str, Any]:
    """The part of a job that can change; the stream carries this, its readers keep the rest from the snapshot."""
    return {
        "id": job.pk,
        "name": job.name,
        "kind": job.kind,
        "state": job.state,
        "phase": job.phase,
        "reason": job.reason,
        "message": job.message,
        "error": job.error,
        "is_terminal": job.is_terminal,
        "cancel_requested": job.cancel_requested_at is not None,
        "paused": job.pause_requested_at is not None,
        "priority": job.priority,
        "attempt": job.attempt,
        "step": job.step,
        "num_steps": job.num_steps,
        "eta_s": job.eta_s,
        "summary": job.summary,
        "tags": job.tags,
        "notes": job.notes,
        "created_at": iso(job.created_at),
        "started_at": iso(job.started_at),
        "finished_at": iso(job.finished_at),
    }


def event_document(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "at": iso(event.at),
        "actor": event.actor,
        "kind": event.kind,
        "from_state": event.from_state,
        "to_state": event.to_state,
        "reason": event.reason,
        "message": event.message,
    }


def artifact_document(artifact: Artifact) -> dict[str, Any]:
    return {
        "id": artifact.pk,
        "job_id": artifact.job_id,
        "name": artifact.name,
        "kind": artifact.kind,
        "path": artifact_path(artifact),
        "num_bytes": artifact.num_bytes,
        "sha256": artifact.sha256,
        "created_at": iso(artifact.created_at),
        "download": f"/api/v1/artifacts/{artifact.pk}/download",
    }


def artifact_path(artifact: Artifact) -> str:
    """Its place among what is downloaded: what belongs together is in a folder of its own."""
    return f"{artifact.kind}/{artifact.name}" if artifact.kind in FOLDER_KINDS else artifact.name


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.folder.rsplit("/", 1)[-1],
        "kind": "checkpoint",
        "step": checkpoint.step,
        "num_bytes": checkpoint.num_bytes,
        "sha256": checkpoint.manifest_sha256,
        "created_at": iso(checkpoint.created_at),
    }


def attempt_documents(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """The line of a job's attempts, all of them in order: each with its plan, how it differs from the last one, and its end.
    Fetch ``members`` with them, or pay a query each."""
    documents: list[dict[str, Any]] = []
    before: Plan | None = None
    for attempt in attempts:
        plan = Plan.from_json(attempt.plan) if attempt.plan and attempt.job.kind == Kind.TRAIN else None
        change = describe_change(before, plan) if plan is not None and before is not None else ""
        documents.append({**_attempt_document(attempt), "change": change})
        before = plan
    return documents


def describe_shortages(job: Job) -> list[str]:
    """A clause for each of the job's attempts that ran out of memory, in order."""
    ran_out = job.attempts.filter(outcome__in=MEMORY_REASONS).order_by("number")
    return [f"attempt {each.number}: {(each.error or {}).get('message', 'memory ran out')}" for each in ran_out]


def fills_disk(error: dict[str, Any] | None, prediction: dict[str, Any] | None) -> bool:
    """Report whether a full disk shows how large a scratch file may be: the plan keeps one, and the error says how much was free.
    Nothing else that a job writes is smaller under another plan.
    """
    fields = (error or {}).get("fields") or {}
    return "free_bytes" in fields and bool((prediction or {}).get("disk_peak_bytes"))


def _attempt_document(attempt: Attempt) -> dict[str, Any]:
    fields: dict[str, Any] = (attempt.error or {}).get("fields") or {}
    cause, stage = str(fields.get("cause", "")), str(fields.get("stage", ""))
    measured_bytes = (attempt.measured or {}).get("device_peak_bytes")
    wanted_bytes = fields["in_use_bytes"] + fields["requested_bytes"] if "requested_bytes" in fields else None
    return {
        "number": attempt.number,
        "worker": attempt.worker,
        "devices": attempt.devices,
        "members": [_member_document(member) for member in attempt.members.all()],
        "outcome": attempt.outcome,
        "cause": cause,
        "stage": stage,
        "why": describe_cause(cause, stage=stage),
        "resumed_from_step": attempt.resumed_from_step,
        "is_shared": attempt.is_shared,
        "plan": attempt.plan,
        "prediction": attempt.prediction,
        "measured": attempt.measured,
        "error": attempt.error,
        "tier": fields.get("tier", "device"),
        "peak_bytes": wanted_bytes or measured_bytes or None,
        "budget_bytes": fields.get("budget_bytes") or attempt.job.spec.get("goal", {}).get("device_budget_bytes"),
        "started_at": iso(attempt.started_at),
        "ended_at": iso(attempt.ended_at),
    }


def _member_document(member: Member) -> dict[str, Any]:
    return {
        "machine": member.machine_name,
        "worker": member.worker,
        "ranks": member.ranks,
        "devices": member.devices,
        "is_lost": member.is_lost,
        "ended_at": iso(member.ended_at),
    }


def _links(job_id: str, kind: str) -> dict[str, str]:
    base = f"/api/v1/jobs/{job_id}"
    parts: tuple[str, ...] = ("cancel", "pause", "resume", "retry", "events", "metrics", "logs")
    parts = (*parts, "artifacts", "checkpoints", "attempts")
    parts = (*parts, "results" if kind == Kind.GENERATE else "model")
    parts = (*parts, "export") if kind == Kind.TRAIN else parts
    return {"self": base, **{part: f"{base}/{part}" for part in parts}, "page": f"/jobs/{job_id}/"}


def event_documents(events: QuerySet[Event]) -> list[dict[str, Any]]:
    return [event_document(event) for event in events]
