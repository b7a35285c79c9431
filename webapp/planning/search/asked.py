"""Reads what the API and the page of plans ask of a model, on a known machine or a card of the table, into complete questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from optimizer.api.compiled_needs import check_compiled_pin
from optimizer.api.shared_needs import check_shared_pin
from optimizer.base.errors import InvalidInput
from optimizer.goal import Budgets, Goal
from optimizer.hardware.devices import table_machine
from optimizer.plan.plan import Plan
from optimizer.search.questions.cards import beside_in
from optimizer.workload import TrainingWorkload
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
from webapp.planning.search.compiled import BeingTraced
from webapp.planning.search.generation import AskedGeneration, GenerationQuestion
from webapp.planning.search.question import Place
from webapp.planning.search.resolve import Asked, Waiting, place_of, resolve
from webapp.planning.search.training import AskedTraining, TrainingQuestion

Q = TypeVar("Q")
_TRAINING = ("kind", "training")
"""Kinds of a workload that trains; the key may be missing."""
_GENERATION_KINDS = ("generation", "inference")
"""The second is how requests named it before; answers say the first."""


@dataclass(frozen=True, kw_only=True)
class AskedOfModel:
    """The request as it was sent, but for the names' types. ``machine`` or ``gpu`` is given, unless cards are ranked."""

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


def read_question(user: Any, asked: AskedOfModel, *, plans: Sequence[Plan] = ()) -> TrainingQuestion | None:
    """About training. None while the model is being profiled, which this asks for.

    plans: those that it is about, whose blocks may be compiled. Raises InvalidInput for the first field that is wrong, and
    ProfileFailed.
    """
    model, workload = read_work(user, asked)
    given = None if asked.goal is None else read_goal(asked.goal)
    place = read_place(user, machine=asked.machine, gpu=asked.gpu, goal=given)
    goal = given or Goal(device_budget_bytes=place.machine.most_memory_bytes)
    check_compiled_pin(goal.pins)
    check_shared_pin(model.config, goal.pins, num_devices=goal.num_devices)
    question = question_at(AskedTraining(model=model, workload=workload, goal=goal), place)
    try:
        return None if question is None else question.that_prices(*plans)
    except BeingTraced:
        return None


def read_generation(user: Any, asked: AskedOfModel) -> GenerationQuestion | None:
    """The same of prompts, or a workload of kind ``generation``."""
    stated = None if asked.goal is None else read_generation_goal(asked.goal)
    place = read_place(user, machine=asked.machine, gpu=asked.gpu, goal=stated)
    given = {"device_budget_bytes": place.machine.most_memory_bytes} if asked.goal is None else asked.goal
    work = {key: value for key, value in asked.workload.items() if key != "kind"}
    if asked.prompts is not None:
        spec = read_generate_spec(
            user, {"kind": "generate", "model": asked.model, "prompts": asked.prompts, "workload": work, "goal": given}
        )
        counted = generation_workload(spec)
        return question_at(AskedGeneration(model=spec.model, goal=spec.goal, read_workload=lambda: counted), place)
    model = find_visible(models_visible_to(user), asked.model, field="model")
    workload = read_generation_workload(work)
    check_generates(model)
    goal = read_generation_goal(given)
    return question_at(AskedGeneration(model=model, goal=goal, read_workload=lambda: workload), place)


def read_work(user: Any, asked: AskedOfModel) -> tuple[Model, TrainingWorkload]:
    """The model, and what it is to train."""
    model: Model = find_visible(models_visible_to(user), asked.model, field="model")
    workload = read_workload({key: value for key, value in asked.workload.items() if (key, value) != _TRAINING})
    check_against_model(workload, model)
    return model, workload


def read_place(user: Any, *, machine: str | None, gpu: str | None, goal: Budgets | None = None) -> Place:
    """With what finished runs taught of it, where it is a real one. goal: its budgets of host and disk are what stands beside a
    card of the table.
    """
    if (machine is None) == (gpu is None):
        raise InvalidInput(
            "machine and gpu are both given; allowed: one of them"
            if gpu is not None
            else "neither machine nor gpu is given; allowed: one of them",
            field="machine",
            allowed="a machine's id, or gpu: the name of a card",
        )
    if gpu is not None:
        return Place(machine=table_machine(gpu, **({} if goal is None else beside_in(goal))))
    # isprintable: a text may hold a NUL, on which PostgreSQL fails
    wanted = str(machine)
    row = machines_visible_to(user).filter(pk=wanted).first() if wanted.isprintable() else None
    if row is None:
        raise InvalidInput(
            f"machine {wanted[:80]!r} is not there", field="machine", value=wanted[:80], allowed="an id of GET /machines"
        )
    return place_of(row)


def question_at(asked: Asked[Q], place: Place) -> Q | None:
    """None while the model is being profiled."""
    questions = resolve(asked, [place])
    return None if isinstance(questions, Waiting) else questions[0]
