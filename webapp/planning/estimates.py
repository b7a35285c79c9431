"""Prices one plan of a model on a known machine or a card of the table, and explains it. Torch-free; nothing is kept.

A model that was never profiled is asked of a worker, as a spec's is (``profiles.py``).
"""

from dataclasses import dataclass
from typing import Any

from optimizer.base.errors import InvalidInput
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.plan import Plan
from webapp.catalog.models import Model
from webapp.catalog.queries import machines_visible_to, models_visible_to
from webapp.jobs.specs.generation import generation_workload, read_generate_spec
from webapp.jobs.specs.training import (
    check_against_model,
    check_generates,
    find_visible,
    read_generation_goal,
    read_generation_workload,
    read_goal,
    read_workload,
)
from webapp.planning.generation_searches import GenerationQuestion
from webapp.planning.profiles import profile_of, read_generation_profile, ready_profile

_TRAINING = ("kind", "training")
"""What a workload says that is no generation; it may say nothing."""

_GENERATION_KINDS = ("generation", "inference")
"""The second is how requests named it before; answers say the first."""


@dataclass(frozen=True, kw_only=True)
class AskedOfModel:
    """As it was sent, but for the names' types. ``machine`` or ``gpu`` is given, unless cards are ranked."""

    model: str
    workload: dict[str, Any]
    """Its ``kind`` is ``training``, also where it has none, or ``generation``."""
    goal: dict[str, Any] | None
    machine: str | None = None
    gpu: str | None = None
    prompts: str | None = None
    """A file of them, for whose lines the model generates; ``workload`` is then a generate job's."""

    @property
    def generates(self) -> bool:
        return self.prompts is not None or self.workload.get("kind") in _GENERATION_KINDS


@dataclass(frozen=True, kw_only=True)
class EstimateRequest(AskedOfModel):
    """The same of one plan."""

    plan: str | dict[str, Any] | None
    with_knobs: bool


def estimate(user: Any, request: EstimateRequest) -> dict[str, Any] | None:
    """None while the model is being profiled.

    Raises InvalidInput for the first field that is wrong, ProfileFailed, and NoFeasiblePlan for ``best`` where nothing fits.
    """
    if request.generates:
        return _estimate_generation(user, request)
    # here, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.api.estimate import estimate_profiled

    model: Model = find_visible(models_visible_to(user), request.model, field="model")
    workload = read_workload({key: value for key, value in request.workload.items() if (key, value) != _TRAINING})
    check_against_model(workload, model)
    machine, calibration = read_machine(user, machine=request.machine, gpu=request.gpu)
    goal = Goal(device_budget_bytes=machine.device.memory_bytes) if request.goal is None else read_goal(request.goal)
    plan = Plan.from_json(request.plan) if isinstance(request.plan, dict) else request.plan
    profile = profile_of(model, adapter=workload.adapter)
    if profile is None:
        return None
    found = estimate_profiled(
        profile,
        machine=machine,
        workload=workload,
        goal=goal,
        plan=plan,
        with_knobs=request.with_knobs,
        calibration=calibration,
    )
    return found.to_json()


def _estimate_generation(user: Any, request: EstimateRequest) -> dict[str, Any] | None:
    from optimizer.api.estimate_generation import estimate_generation_profiled

    plan = GenerationPlan.from_json(request.plan) if isinstance(request.plan, dict) else request.plan
    asked = read_generation(user, request)
    if asked is None:
        return None
    found = estimate_generation_profiled(
        asked.profile, plan=plan, workload=asked.workload, machine=asked.machine, goal=asked.goal, calibration=asked.calibration
    )
    return {"kind": "generation", **found.to_json()}


def read_generation(user: Any, asked: AskedOfModel) -> GenerationQuestion | None:
    """Of prompts, or a workload of kind ``generation``. None while the model is being profiled.

    Raises InvalidInput for the first field that is wrong.
    """
    machine, calibration = read_machine(user, machine=asked.machine, gpu=asked.gpu)
    given = {"device_budget_bytes": machine.device.memory_bytes} if asked.goal is None else asked.goal
    told = {key: value for key, value in asked.workload.items() if key != "kind"}
    if asked.prompts is not None:
        spec = read_generate_spec(
            user, {"kind": "generate", "model": asked.model, "prompts": asked.prompts, "workload": told, "goal": given}
        )
        model, workload, goal = spec.model, generation_workload(spec), spec.goal
    else:
        model = find_visible(models_visible_to(user), asked.model, field="model")
        workload = read_generation_workload(told)
        check_generates(model)
        goal = read_generation_goal(given)
    row = ready_profile(model, generates=True)
    if row is None:
        return None
    return GenerationQuestion(
        profile=read_generation_profile(row.pk, row.document_sha256),
        profile_sha256=row.document_sha256,
        workload=workload,
        goal=goal,
        machine=machine,
        calibration=calibration,
    )


def read_machine(user: Any, *, machine: str | None, gpu: str | None) -> tuple[MachineSpec, dict[str, Any] | None]:
    """With what finished runs taught of it, where it is a real one."""
    from optimizer.hardware.devices import table_machine

    if (machine is None) == (gpu is None):
        raise InvalidInput(
            "machine and gpu are both given; allowed: one of them"
            if gpu is not None
            else "neither machine nor gpu is given; allowed: one of them",
            field="machine",
            allowed="a machine's id, or gpu: the name of a card",
        )
    if gpu is not None:
        return table_machine(gpu), None
    # isprintable: a text may hold a NUL, on which PostgreSQL fails
    wanted = str(machine)
    row = machines_visible_to(user).filter(pk=wanted).first() if wanted.isprintable() else None
    if row is None:
        raise InvalidInput(
            f"machine {wanted[:80]!r} is not there", field="machine", value=wanted[:80], allowed="an id of GET /machines"
        )
    return MachineSpec.from_json(row.document), row.calibration
