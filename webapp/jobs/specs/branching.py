"""Reads ``resume_from`` of a job spec: the checkpoint of another run that a new one goes on from.

What the checkpoint holds must have the form that the new run wants: the same model, adapters, optimizer, dtype and bits. The last
two are pinned from the other run's plan, so that the search looks for nothing else.
"""

from typing import Any

from optimizer.api.keep_form import keep_form
from optimizer.base.errors import InvalidInput, InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_value
from optimizer.goal import Goal
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Model
from webapp.jobs.checkpoints import find_checkpoint
from webapp.jobs.models import Checkpoint, Kind
from webapp.jobs.queries import jobs_visible_to

FIELD = "resume_from"
_SAME = ("mode", "adapter", "optimizer", "momentum")
"""Fields of the workload that decide what a checkpoint holds."""


def read_resume_from(user: Any, given: Any) -> Checkpoint | None:
    """``{"job": id, "step": number}``, the newest checkpoint without a step. Raises InvalidInput, NoCheckpoint."""
    if given is None:
        return None
    if not isinstance(given, dict) or set(given) - {"job", "step"} or not isinstance(given.get("job"), str):
        raise _refusal(f"is {given!r:.80}", given, allowed="{job: a job's id, step: a step with a checkpoint}")
    step = given.get("step")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise _refusal(f"names step {step!r:.40}", step, allowed="a whole number, or no step for the newest checkpoint")
    job = jobs_visible_to(user).filter(pk=given["job"], kind=Kind.TRAIN).first()
    if job is None:
        raise _refusal(f"names job {given['job'][:60]!r}", given["job"], allowed="the id of one of your training jobs")
    return find_checkpoint(job, step)


def check_branch(checkpoint: Checkpoint, workload: TrainingWorkload, model: Model) -> None:
    """Raise InvalidInput for a checkpoint that the workload cannot go on from."""
    source = checkpoint.job
    if source.model.fingerprint != model.fingerprint or (workload.mode == "finetune" and source.model_id != model.pk):
        raise _refusal(
            f"is a checkpoint of {source.model.name}, the spec names {model.name}", model.name, allowed=source.model.name
        )
    given, there = to_json(workload), to_json(from_json(TrainingWorkload, source.spec["workload"], path="workload"))
    for name in _SAME:
        if given[name] != there[name]:
            raise InvalidWorkload(
                f"workload.{name} is {shown_value(given[name])!r:.80}; the checkpoint in {FIELD} was trained with "
                f"{shown_value(there[name])!r:.80}",
                field=f"workload.{name}",
                value=shown_value(given[name]),
                allowed=shown_value(there[name]),
            )
    if workload.num_steps <= checkpoint.step:
        raise InvalidWorkload(
            f"workload.num_steps is {workload.num_steps:,}; the checkpoint in {FIELD} has {checkpoint.step:,} steps behind it",
            field="workload.num_steps",
            value=workload.num_steps,
            allowed={"minimum": checkpoint.step + 1},
            hint="Steps are counted from the beginning of the run that is branched from.",
        )


def with_pins(goal: Goal, checkpoint: Checkpoint) -> Goal:
    """The goal with the form of weights and state pinned to what the checkpoint holds, and the loss of that form allowed."""
    document = checkpoint.job.plan
    if document is None:
        return goal
    return keep_form(goal, Plan.from_json(document), has_adapter=bool(checkpoint.job.spec["workload"].get("adapter")))


def branch_document(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The part of a normalized spec."""
    return {} if checkpoint is None else {FIELD: {"job": checkpoint.job_id, "step": checkpoint.step}}


def _refusal(found: str, value: Any, *, allowed: str) -> InvalidInput:
    return InvalidInput(f"{FIELD} {found}; allowed: {allowed}", field=FIELD, value=shown_value(value), allowed=allowed)
