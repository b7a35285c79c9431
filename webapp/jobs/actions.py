"""Makes jobs, gives them plans and does what people ask of them: cancel, pause, resume, retry, set the priority.

Each is a conditional update and an event in one transaction (``moves.py``). How a worker claims jobs, records how they go and
ends them is in ``webapp/attempts/``.
"""

from collections.abc import Collection
from typing import Any, Literal

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.base.serialize import from_json
from optimizer.estimate.sharing import device_need_bytes
from optimizer.hardware.machine import Device
from optimizer.plan.devices.generation_layout import count_devices
from webapp.accounts.models import Project
from webapp.catalog.files.room import require_floor
from webapp.catalog.models import Dataset, Machine, Model
from webapp.ids import new_job_id
from webapp.jobs.devices.joined import is_joined, ranks_by_machine
from webapp.jobs.devices.named import JOINED, NAMED, RankNeed, write_needs
from webapp.jobs.devices.needs import joined_needs_of, needs_of
from webapp.jobs.devices.room import largest_device
from webapp.jobs.errors import JobConflict, WrongState
from webapp.jobs.models import (
    LIVE_STATES,
    TERMINAL_STATES,
    USER_JOB_KINDS,
    Event,
    Job,
    Reason,
    State,
)
from webapp.jobs.moves import enqueue_webhooks, move_job, move_jobs
from webapp.jobs.turns import next_turn, require_queue_room
from webapp.wire.hints import hint_soon

CancelMode = Literal["save", "keep", "discard"]
"""``save`` stops at a checkpoint and exports its weights, ``keep`` stops at a checkpoint, ``discard`` stops at once."""
CancelOutcome = Literal["cancelled", "asked_to_stop", "already_asked", "ended"]
"""``ended``: before it was asked."""
MAX_PRIORITY = 100
"""Priorities go from its negative to it; new jobs have 0."""


def create_job(
    *,
    owner: User | None,
    project: Project | None = None,
    spec: dict[str, Any],
    model: Model,
    dataset: Dataset | None,
    plan: dict[str, Any] | None,
    prediction: dict[str, Any] | None,
    machine: Machine | None,
    kind: str = "train",
    actor: str,
    retry_of: Job | None = None,
    num_steps: int | None = None,
    max_duration_s: int | None = None,
    awaits_plan: bool = False,
    job_id: str = "",
) -> Job:
    """Job and first event in one transaction; workers are woken after the commit.

    project: whose it is; the one its owner works in unless given. num_steps: what the job counts its progress to; of training
    the workload's steps, and not given. awaits_plan: it may not start before ``plan_job``. job_id: of files that are there
    already (``checkpoints.py``).
    """
    with transaction.atomic(savepoint=False):
        job = Job.objects.create(
            id=job_id or new_job_id(),
            owner=owner,
            project=project,
            name=spec.get("name") or model.name,
            kind=kind,
            model=model,
            dataset=dataset,
            spec=spec,
            plan=plan,
            prediction=prediction,
            machine=machine,
            num_steps=spec.get("workload", {}).get("num_steps", 0) if num_steps is None else num_steps,
            max_duration_s=max_duration_s,
            awaits_plan=awaits_plan,
            turn=next_turn(owner, kind=kind),
            **_needs(spec, plan, prediction, machine),
            retry_of=retry_of,
            event_seq=1,
            hinted_at=timezone.now(),
        )
        _join_machines(job)
        Event.objects.create(job=job, seq=1, actor=actor, kind="created", to_state=State.QUEUED)
        enqueue_webhooks(job, "created")
        _hint_on_commit(job.pk)
    return job


def plan_job(
    job: Job,
    *,
    spec: dict[str, Any],
    plan: dict[str, Any],
    prediction: dict[str, Any],
    machine: Machine,
    change: str = "",
    when: Q | None = None,
) -> bool:
    """Give a job that awaits its plan one, after which it may start. False when it no longer awaits one.

    change: how the plan differs from the one before, where there was one. when: another condition than that it awaits one.
    """
    changes = {
        "spec": spec,
        "plan": plan,
        "prediction": prediction,
        "machine": machine,
        "awaits_plan": False,
        **_needs(spec, plan, prediction, machine),
    }
    kind = "replanned" if change else "planned"
    with transaction.atomic():
        planned = move_job(job.pk, when=when or _awaiting(), changes=changes, kind=kind, actor="program", message=change)
        if planned is not None:
            if is_joined(job):
                planned.joined.clear()
            _join_machines(planned)
            _hint_on_commit(job.pk)
    return planned is not None


def refuse_plan(job: Job, *, reason: Reason, error: HeadroomError, message: str = "") -> bool:
    """End a job for which no plan can be found. False when it no longer awaits one. message: the error's unless given."""
    message = message or error.message
    changes = {
        "state": State.FAILED,
        "reason": reason,
        "message": f"{message[:1].upper()}{message[1:]}.",
        "error": error.to_json(),
        "awaits_plan": False,
        "finished_at": Now(),
    }
    return move_job(
        job.pk, when=_awaiting(), changes=changes, kind="failed", actor="program", reason=reason, message=message
    ) is not None


def _awaiting() -> Q:
    return Q(state=State.QUEUED, awaits_plan=True)


def cancel_job(job: Job, *, mode: CancelMode, actor: str) -> bool:
    """Ask for the end of a job. True when this call changed something, False when the same was asked before.

    A queued job is cancelled at once; a live one by its supervisor. ``discard`` after ``save`` hurries it.
    """
    if any(move_job(job.pk, **how) is not None for how in _ways_to_cancel(mode, actor=actor)):
        return True
    _require_state(job, "cancel", Q(state__in=LIVE_STATES), allowed="queued, starting or running")
    return False


def cancel_jobs(job_ids: Collection[str], *, mode: CancelMode, actor: str) -> dict[str, CancelOutcome]:
    """``cancel_job`` for many, in a few statements. One that is claimed meanwhile is asked to stop, as by itself."""
    queued, live = _ways_to_cancel(mode, actor=actor)
    with transaction.atomic():
        outcomes: dict[str, CancelOutcome] = dict.fromkeys((job.pk for job in move_jobs(job_ids, **queued)), "cancelled")
        left = set(job_ids) - outcomes.keys()
        outcomes |= dict.fromkeys((job.pk for job in move_jobs(left, **live)), "asked_to_stop")
        left -= outcomes.keys()
        for job_id, state in Job.objects.filter(pk__in=left).values_list("pk", "state"):
            outcomes[job_id] = "already_asked" if state in LIVE_STATES else "ended"
    return outcomes


def _ways_to_cancel(mode: CancelMode, *, actor: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The moves of a job that waits and of one that is at work."""
    queued = {
        "when": Q(state=State.QUEUED),
        "changes": {
            "state": State.CANCELLED,
            "reason": Reason.CANCELLED_BY_USER,
            "cancel_requested_at": Now(),
            "cancel_mode": mode,
            "finished_at": Now(),
        },
        "kind": "cancelled",
        "actor": actor,
        "reason": Reason.CANCELLED_BY_USER,
    }
    saves = Q(cancel_mode__in=("save", "keep"))
    not_yet = Q(cancel_requested_at__isnull=True) | (saves if mode == "discard" else Q(pk__isnull=True))
    live = {
        "when": Q(state__in=LIVE_STATES) & not_yet,
        "changes": {"cancel_requested_at": Now(), "cancel_mode": mode},
        "kind": "cancel_requested",
        "actor": actor,
        "message": mode,
    }
    return queued, live


def pause_job(job: Job, *, actor: str) -> Job:
    """A queued job may not start; a live one stops at a checkpoint and goes back to queued."""
    when = ~Q(state__in=TERMINAL_STATES) & Q(pause_requested_at__isnull=True, cancel_requested_at__isnull=True)
    paused = move_job(job.pk, when=when, changes={"pause_requested_at": Now()}, kind="paused", actor=actor)
    return paused or _refuse(job, "pause", allowed="queued, starting or running, and neither paused nor being cancelled")


def resume_job(job: Job, *, actor: str) -> Job:
    """Lift a pause, whether or not it has taken effect."""
    when = ~Q(state__in=TERMINAL_STATES) & Q(pause_requested_at__isnull=False)
    with transaction.atomic():
        changes = {"pause_requested_at": None, "not_before": None}
        resumed = move_job(job.pk, when=when, changes=changes, kind="resumed", actor=actor)
        if resumed is None:
            return _refuse(job, "resume", allowed="paused")
        _hint_on_commit(job.pk)
    return resumed


def set_priority(job: Job, priority: int, *, actor: str, may_overtake: bool) -> Job:
    """Set a waiting job's place: higher first, equals by turn. may_overtake: administrators', who may go above 0.

    Raises InvalidInput beyond what is allowed, JobConflict for a job that no longer waits.
    """
    highest = MAX_PRIORITY if may_overtake else max(0, job.priority)
    if not -MAX_PRIORITY <= priority <= highest:
        raise InvalidInput(
            f"priority is {priority}; allowed: {-MAX_PRIORITY} to {highest}",
            field="priority",
            value=priority,
            allowed={"minimum": -MAX_PRIORITY, "maximum": highest},
            hint="" if may_overtake else "Only administrators move jobs ahead of others'.",
        )
    moved = move_job(
        job.pk,
        when=Q(state=State.QUEUED),
        changes={"priority": priority},
        kind="moved",
        actor=actor,
        message=f"priority {priority}",
    )
    return moved or _refuse(job, "move", allowed="queued")


def retry_job(job: Job, *, actor: str, owner: Any = None) -> Job:
    """The same spec and plan again, as a new job: an ended one never moves. It goes on from the newest checkpoint of the
    ended one, where there is one. Only what failed or was cancelled is retried.

    owner: who asks for it, whose turns and limits it takes; without one it is the program's doing. Raises LimitReached.
    """
    job.refresh_from_db()
    if job.kind not in USER_JOB_KINDS or job.state not in (State.FAILED, State.CANCELLED):
        return _refuse(job, "retry", allowed="failed or cancelled")
    for row in (job.model, job.dataset):
        if row is not None and row.deleted_at is not None:
            raise JobConflict(f"{row.name} was deleted, and the job needs it", hint="Restore it, or start a new job.")
    require_floor()
    if owner is not None:
        require_queue_room(owner, job.project)
    return create_job(
        owner=owner or job.owner,
        project=job.project,
        spec=job.spec,
        model=job.model,
        dataset=job.dataset,
        plan=job.plan,
        prediction=job.prediction,
        machine=job.machine,
        actor=actor,
        retry_of=job,
        kind=job.kind,
        num_steps=job.num_steps,
        awaits_plan=job.awaits_plan or job.reason in (Reason.DOES_NOT_FIT, Reason.NOT_PLANNED),
    )


def _hint_on_commit(job_id: str) -> None:
    transaction.on_commit(lambda: _hint(job_id), robust=True)


def _hint(job_id: str) -> None:
    """The row says already that workers were woken; put it right where they could not be."""
    if not hint_soon(job_id):
        Job.objects.filter(pk=job_id).update(hinted_at=None)


def _needs(
    spec: dict[str, Any], plan: dict[str, Any] | None, prediction: dict[str, Any] | None, machine: Machine | None
) -> dict[str, Any]:
    """The fields of a job that say which devices it needs."""
    budget_bytes = spec.get("goal", {}).get("device_budget_bytes")
    needs: list[RankNeed] = []
    if names := spec.get("machines"):
        documents = dict(Machine.objects.filter(name__in=names).values_list("name", "document"))
        needs = joined_needs_of(plan, prediction, machines=documents, budget_bytes=budget_bytes)
    elif machine is not None:
        needs = needs_of(plan, prediction, machine=machine.document, budget_bytes=budget_bytes)
    if needs:
        most = max(need.num_bytes for need in needs)
        named = {"need_device_kind": JOINED if names else NAMED, "need_ranks": write_needs(needs)}
        return {**named, "need_device_bytes": most, "need_devices": len(needs)}
    device = from_json(Device, largest_device(machine), path="machine.device") if machine is not None else None
    return {
        "need_device_kind": device.kind if device else "",
        "need_ranks": "",
        "need_device_bytes": device_need_bytes(prediction, budget_bytes=budget_bytes, device=device),
        "need_devices": count_devices(plan),
    }


def _join_machines(job: Job) -> None:
    """Keep which machines the job runs on together, by which claims find it."""
    if job.spec.get("machines"):
        job.joined.set(Machine.objects.filter(name__in=ranks_by_machine(job)))


def _require_state(job: Job, request: str, condition: Q, *, allowed: str) -> None:
    if not Job.objects.filter(condition, pk=job.pk).exists():
        _refuse(job, request, allowed=allowed)


def _refuse(job: Job, request: str, *, allowed: str) -> Job:
    job.refresh_from_db(fields=["state", "pause_requested_at", "cancel_requested_at"])
    state = str(job.state)
    if job.pause_requested_at is not None and not job.is_terminal:
        state += ", paused"
    if job.cancel_requested_at is not None and not job.is_terminal:
        state += ", being cancelled"
    raise WrongState(request, job_id=job.pk, state=state, allowed=allowed)
