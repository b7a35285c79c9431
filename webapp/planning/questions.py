"""What ``headroom plan`` answers, for the API: the best plan for a goal, plans side by side, cards ranked, a plan after one edit.

Torch-free; nothing is kept. A model that was never profiled is asked of a worker, as a spec's is (``profiles.py``).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import from_json, to_json
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import known_devices
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import change_generation
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload
from webapp.catalog.models import Model
from webapp.catalog.queries import models_visible_to
from webapp.jobs.specs.training import check_against_model, find_visible, read_goal, read_workload
from webapp.planning.estimates import AskedOfModel, read_generation, read_machine
from webapp.planning.generation_searches import find_generation
from webapp.planning.profiles import known_profiles_of, profile_of, read_profile, ready_profile
from webapp.planning.searches import TrainingQuestion, find_answer

if TYPE_CHECKING:
    from optimizer.search.questions.objectives import ObjectiveAnswer


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question read: what is searched, and of which model."""

    model: Model
    question: TrainingQuestion

    @property
    def here(self) -> dict[str, Any]:
        asked = self.question
        return {
            "machine": asked.machine,
            "workload": asked.workload,
            "goal": asked.goal,
            "calibration": asked.calibration,
        }

    def answer(self) -> "ObjectiveAnswer":
        """The best plan, from memory where it was asked for before. Raises NoFeasiblePlan with what would fit."""
        return find_answer(self.question, obtain=known_profiles_of(self.model, self.question))


def find_best(user: Any, question: AskedOfModel) -> dict[str, Any] | None:
    """For any objective. None while the model is being profiled, as in all of these.

    Raises InvalidInput for the first field that is wrong, ProfileFailed, and NoFeasiblePlan with what would fit.
    """
    if question.generates:
        return _find_best_generation(user, question)
    asked = read_question(user, question)
    if asked is None:
        return None
    answer = asked.answer().to_json()
    return {"profile": "ready", "machine": asked.question.machine.to_json(), **answer.pop("result"), **answer}


def _find_best_generation(user: Any, question: AskedOfModel) -> dict[str, Any] | None:
    asked = read_generation(user, question)
    if asked is None:
        return None
    answer = find_generation(asked)
    if answer.nothing_fits is not None:
        raise answer.nothing_fits.error()
    return {
        "kind": "generation",
        "machine": asked.machine.to_json(),
        "objective": asked.goal.objective,
        "workload": to_json(asked.workload),
        "chosen": to_json(answer.chosen),
        "baselines": to_json(answer.baselines),
        "frontier": to_json(answer.frontier),
        "explanation": list(answer.explanation),
    }


def compare(user: Any, question: AskedOfModel, plans: dict[str, Any]) -> dict[str, Any] | None:
    """plans: by the name to show, a plan, a baseline's label or ``best``."""
    # here and below, so that numpy and scipy are loaded with the first price and not with every process that knows of jobs
    from optimizer.api.plan import compare_profiled

    if question.generates:
        return _compare_generations(user, question, plans)
    read = {name: Plan.from_json(plan) if isinstance(plan, dict) else plan for name, plan in plans.items()}
    asked = read_question(user, question)
    if asked is None:
        return None
    return {"profile": "ready", **compare_profiled(asked.question.profile, read, **asked.here).to_json()}


def rank_cards(user: Any, question: AskedOfModel, cards: list[str], *, by_money: bool) -> dict[str, Any] | None:
    """cards: names of the table, or ``all``."""
    from optimizer.api.plan import rank_cards_profiled
    from optimizer.search.questions.cards import read_cards

    read_cards(cards)
    if question.generates:
        return _rank_cards_to_generate(user, question, cards, by_money=by_money)
    model, workload = _read_work(user, question)
    goal = Goal(device_budget_bytes=UNLIMITED_BYTES) if question.goal is None else read_goal(question.goal)
    profile = profile_of(model, adapter=workload.adapter)
    if profile is None:
        return None
    order: Literal["speed", "money"] = "money" if by_money or goal.objective == "cheapest_run" else "speed"
    found = rank_cards_profiled(profile, cards, workload=workload, goal=goal, order=order)
    return {"profile": "ready", "order": order, "cards": to_json(found)}


def price_change(user: Any, question: AskedOfModel, plan: dict[str, Any], change: dict[str, Any]) -> dict[str, Any] | None:
    """change: a part of a plan's JSON, such as ``{"optimizer_state": {"bits": 8}}``, or ``{"kv_cache": {"place": "host"}}``."""
    from optimizer.api.plan import reprice_profiled

    if question.generates:
        return _price_changed_generation(user, question, plan, change)
    read, pins = Plan.from_json(plan), from_json(Pins, change, path="change", error=InvalidPlan)
    asked = read_question(user, question)
    if asked is None:
        return None
    return {"profile": "ready", **reprice_profiled(asked.question.profile, read, change=pins, **asked.here).to_json()}


def _compare_generations(user: Any, question: AskedOfModel, plans: dict[str, Any]) -> dict[str, Any] | None:
    from optimizer.api.plan_generation import compare_generations_profiled

    read = {name: GenerationPlan.from_json(plan) if isinstance(plan, dict) else plan for name, plan in plans.items()}
    asked = read_generation(user, question)
    if asked is None:
        return None
    return {"kind": "generation", **compare_generations_profiled(asked.profile, read, **asked.here).to_json()}


def _rank_cards_to_generate(
    user: Any, question: AskedOfModel, cards: list[str], *, by_money: bool
) -> dict[str, Any] | None:
    from optimizer.api.plan_generation import rank_cards_to_generate

    # any card: what is asked of the place is not looked at
    asked = read_generation(user, replace(question, machine=None, gpu=next(iter(known_devices()))))
    if asked is None:
        return None
    goal = asked.goal if question.goal is not None else replace(asked.goal, device_budget_bytes=UNLIMITED_BYTES)
    order: Literal["speed", "money"] = "money" if by_money else "speed"
    found = rank_cards_to_generate(asked.profile, cards, workload=asked.workload, goal=goal, order=order)
    return {"profile": "ready", "order": order, "cards": to_json(found)}


def _price_changed_generation(
    user: Any, question: AskedOfModel, plan: dict[str, Any], change: dict[str, Any]
) -> dict[str, Any] | None:
    from optimizer.api.plan_generation import reprice_generation_profiled

    read = GenerationPlan.from_json(plan)
    change_generation(read, change)  # what is no change is refused before a model is profiled
    asked = read_generation(user, question)
    if asked is None:
        return None
    return {"kind": "generation", **reprice_generation_profiled(asked.profile, read, change=change, **asked.here).to_json()}


def read_question(user: Any, question: AskedOfModel) -> Asked | None:
    """None while the model is being profiled, which this asks for."""
    model, workload = _read_work(user, question)
    machine, calibration = read_machine(user, machine=question.machine, gpu=question.gpu)
    goal = Goal(device_budget_bytes=machine.device.memory_bytes) if question.goal is None else read_goal(question.goal)
    row = ready_profile(model, adapter=workload.adapter)
    if row is None:
        return None
    found = TrainingQuestion(
        profile=read_profile(row.pk, row.document_sha256),
        profile_sha256=row.document_sha256,
        workload=workload,
        goal=goal,
        machine=machine,
        calibration=calibration,
    )
    return Asked(model=model, question=found)


def _read_work(user: Any, question: AskedOfModel) -> tuple[Model, TrainingWorkload]:
    model: Model = find_visible(models_visible_to(user), question.model, field="model")
    workload = read_workload(question.workload)
    check_against_model(workload, model)
    return model, workload
