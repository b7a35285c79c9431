"""Answers the API's questions about plans, as ``headroom plan`` does: the best plan for a goal, plans side by side,
cards ranked, a plan after one edit.

Torch-free; nothing is kept. A model that was never profiled is asked of a worker, as a spec's is (``resolve.py``).
"""

from dataclasses import replace
from typing import Any, Literal

from optimizer.api.compiled_needs import check_compiled_pin, compiled_representations
from optimizer.api.plan import compare_profiled, rank_cards_profiled, reprice_profiled
from optimizer.api.plan_generation import (
    compare_generations_profiled,
    rank_cards_to_generate,
    reprice_generation_profiled,
)
from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import from_json, to_json
from optimizer.goal import UNLIMITED_BYTES, Goal
from optimizer.hardware.devices import known_devices
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import change_generation
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.search.answer.compare import change_plan
from optimizer.search.questions.cards import read_cards
from webapp.accounts.turns import take_turn
from webapp.jobs.specs.training import read_goal
from webapp.planning.search.asked import AskedOfModel, read_generation, read_question, read_work
from webapp.planning.search.generation import find_generation
from webapp.planning.search.profile_requests import ready_profile
from webapp.planning.search.profiles import ProfileNeed, read_profile
from webapp.planning.search.training import find_offered


def find_best(user: Any, question: AskedOfModel) -> dict[str, Any] | None:
    """For any objective. None while the model is being profiled, as in all of these.

    Raises InvalidInput for the first field that is wrong, ProfileFailed, and NoFeasiblePlan with what would fit.
    """
    if question.generates:
        return _find_best_generation(user, question)
    asked = read_question(user, question)
    if asked is None:
        return None
    found = find_offered(asked)
    answer = found.answer.to_json()
    awaited = {"compiled_blocks": "pending"} if found.awaits_compiled else {}
    return {"profile": "ready", "machine": asked.place.machine.to_json(), **answer.pop("result"), **answer, **awaited}


def _find_best_generation(user: Any, question: AskedOfModel) -> dict[str, Any] | None:
    asked = read_generation(user, question)
    if asked is None:
        return None
    answer = find_generation(asked)
    if answer.nothing_fits is not None:
        raise answer.nothing_fits.error()
    return {
        "kind": "generation",
        "machine": asked.place.machine.to_json(),
        "objective": asked.goal.objective,
        "workload": to_json(asked.workload),
        "chosen": to_json(answer.chosen),
        "baselines": to_json(answer.baselines),
        "frontier": to_json(answer.frontier),
        "explanation": list(answer.explanation),
    }


def compare(user: Any, question: AskedOfModel, plans: dict[str, Any]) -> dict[str, Any] | None:
    """plans: by the name to show, a plan, a baseline's label or ``best``."""
    if question.generates:
        return _compare_generations(user, question, plans)
    read = {name: Plan.from_json(plan) if isinstance(plan, dict) else plan for name, plan in plans.items()}
    asked = read_question(user, question, plans=[plan for plan in read.values() if isinstance(plan, Plan)])
    if asked is None:
        return None
    with take_turn():
        return {"profile": "ready", **compare_profiled(asked.profile, read, **asked.here).to_json()}


def _compare_generations(user: Any, question: AskedOfModel, plans: dict[str, Any]) -> dict[str, Any] | None:
    read = {name: GenerationPlan.from_json(plan) if isinstance(plan, dict) else plan for name, plan in plans.items()}
    asked = read_generation(user, question)
    if asked is None:
        return None
    with take_turn():
        return {"kind": "generation", **compare_generations_profiled(asked.profile, read, **asked.here).to_json()}


def rank_cards(user: Any, question: AskedOfModel, cards: list[str], *, by_money: bool) -> dict[str, Any] | None:
    """cards: names of the table, or ``all``."""
    read_cards(cards)
    if question.generates:
        return _rank_cards_to_generate(user, question, cards, by_money=by_money)
    model, workload = read_work(user, question)
    goal = Goal(device_budget_bytes=UNLIMITED_BYTES) if question.goal is None else read_goal(question.goal)
    check_compiled_pin(goal.pins)
    compiled = compiled_representations(workload, goal.pins, goal.may_use)
    row = ready_profile(ProfileNeed.of_training(model, workload, compiled=compiled))
    if row is None:
        return None
    profile = read_profile(row.pk, row.document_sha256)
    order: Literal["speed", "money"] = "money" if by_money or goal.objective == "cheapest_run" else "speed"
    with take_turn():
        found = rank_cards_profiled(profile, cards, workload=workload, goal=goal, order=order)
    return {"profile": "ready", "order": order, "cards": to_json(found)}


def _rank_cards_to_generate(
    user: Any, question: AskedOfModel, cards: list[str], *, by_money: bool
) -> dict[str, Any] | None:
    # any card: what is asked of the place is not looked at
    asked = read_generation(user, replace(question, machine=None, gpu=next(iter(known_devices()))))
    if asked is None:
        return None
    goal = asked.goal if question.goal is not None else replace(asked.goal, device_budget_bytes=UNLIMITED_BYTES)
    order: Literal["speed", "money"] = "money" if by_money else "speed"
    with take_turn():
        found = rank_cards_to_generate(asked.profile, cards, workload=asked.workload, goal=goal, order=order)
    return {"profile": "ready", "order": order, "cards": to_json(found)}


def price_change(user: Any, question: AskedOfModel, plan: dict[str, Any], change: dict[str, Any]) -> dict[str, Any] | None:
    """change: a part of a plan's JSON, such as ``{"optimizer_state": {"bits": 8}}``, or ``{"kv_cache": {"place": "host"}}``."""
    if question.generates:
        return _price_changed_generation(user, question, plan, change)
    read, pins = Plan.from_json(plan), from_json(Pins, change, path="change", error=InvalidPlan)
    asked = read_question(user, question, plans=[read, change_plan(read, pins)])
    if asked is None:
        return None
    with take_turn():
        return {"profile": "ready", **reprice_profiled(asked.profile, read, change=pins, **asked.here).to_json()}


def _price_changed_generation(
    user: Any, question: AskedOfModel, plan: dict[str, Any], change: dict[str, Any]
) -> dict[str, Any] | None:
    read = GenerationPlan.from_json(plan)
    change_generation(read, change)  # what is no change is refused before a model is profiled
    asked = read_generation(user, question)
    if asked is None:
        return None
    with take_turn():
        found = reprice_generation_profiled(asked.profile, read, change=change, **asked.here)
    return {"kind": "generation", **found.to_json()}
