"""Answers for a batch generation what ``plan.py`` answers for training: the best plan, plans side by side, cards ranked, an edit.

Torch-free. ``..._profiled`` and ``rank_cards_to_generate`` have the profile at hand; the others take a config, a preset's name or
a ModelSpec, and trace it in a child where it was not seen before. In comparisons and rankings a search sees every prompt as the
longest, since a price grows with the number of lengths; what is shown is priced with all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.api.inputs import (
    BEST,
    Model,
    check_goal_devices,
    check_number_compared,
    check_one_device,
    known_machine,
)
from optimizer.api.needs import check_plan_label, generation_profile_for
from optimizer.goal import UNLIMITED_BYTES, GenerationGoal
from optimizer.hardware.devices import Beside
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import PriceList, read_prices
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import read_generation_change
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.baselines import price_generation_baselines
from optimizer.search.generation.compare import (
    GenerationComparison,
    RepricedGeneration,
    compare_generations,
    reprice_generation,
)
from optimizer.search.generation.frontier import generation_label
from optimizer.search.generation.one_device import GenerationSearchResult, find_best_generation, generation_problem
from optimizer.search.generation.problem import GenerationProblem
from optimizer.search.generation.search import search_generation_plans
from optimizer.search.generation.solve import Book
from optimizer.search.questions.cards import ALL, CardAnswer, Found, Order, Progress, beside_in, rank, read_cards
from optimizer.workload import GenerationWorkload


def plan_generation(
    model: Model,
    *,
    machine: str | Machine,
    workload: GenerationWorkload | None = None,
    goal: GenerationGoal | None = None,
    profiles_folder: Path | None = None,
) -> GenerationSearchResult:
    """The best plan; of the whole card, lossless and of most tokens per second unless a goal is given.

    machine: a card's name, or a measured one. Raises InvalidInput and what is below it for anything that was asked wrongly, and
    NoFeasiblePlan.
    """
    workload = workload or GenerationWorkload()
    target = known_machine(machine, num_devices=goal.num_devices if goal else 1)
    goal = goal or GenerationGoal(device_budget_bytes=target.device.memory_bytes)
    check_goal_devices(goal, target)
    profile = generation_profile_for(model, workload=workload, goal=goal, folder=profiles_folder)
    return search_generation_plans(profile, workload=workload, goal=goal, machine=target)


def compare_model_generations(
    model: Model,
    plans: Mapping[str, str | GenerationPlan],
    *,
    machine: str | Machine,
    workload: GenerationWorkload | None = None,
    goal: GenerationGoal | None = None,
    profiles_folder: Path | None = None,
) -> GenerationComparison:
    """Plans side by side. plans: by the name to show, a plan, a baseline's label or ``best``."""
    workload, target = workload or GenerationWorkload(), known_machine(machine)
    goal = goal or GenerationGoal(device_budget_bytes=target.device.memory_bytes)
    _check_compared(plans)
    profile = generation_profile_for(model, workload=workload, goal=goal, plans=plans.values(), folder=profiles_folder)
    return compare_generations_profiled(profile, plans, machine=target, workload=workload, goal=goal)


def rank_model_cards_to_generate(
    model: Model,
    cards: Sequence[str] = (ALL,),
    *,
    workload: GenerationWorkload | None = None,
    goal: GenerationGoal | None = None,
    order: Order = "speed",
    prices: PriceList | None = None,
    profiles_folder: Path | None = None,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> tuple[CardAnswer, ...]:
    """Cards of the table by tokens per second, or by the rent of a million tokens. Without a goal each with all its memory.

    progress: called with each card before it is looked at. beside: the host and the disk that each is taken to have.
    """
    workload, goal = workload or GenerationWorkload(), goal or GenerationGoal(device_budget_bytes=UNLIMITED_BYTES)
    read_cards(cards)  # what is no card is refused before a model is traced
    profile = generation_profile_for(model, workload=workload, goal=goal, folder=profiles_folder)
    return rank_cards_to_generate(
        profile, cards, workload=workload, goal=goal, order=order, prices=prices, progress=progress, beside=beside
    )


def compare_generations_profiled(
    profile: GenerationProfile,
    plans: Mapping[str, str | GenerationPlan],
    *,
    machine: Machine,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    calibration: Mapping[str, Any] | None = None,
) -> GenerationComparison:
    """plans: by the name to show, a plan, a baseline's label or ``best``."""
    check_one_device(goal)
    _check_compared(plans)
    here: dict[str, Any] = {"goal": goal, "machine": machine, "calibration": calibration}
    GenerationPlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    alike = workload.as_if_equal(max_sequence_length=profile.max_sequence_length)
    bound = generation_problem(profile, workload=alike, **here)
    found = {name: plan if isinstance(plan, GenerationPlan) else _called(plan, bound) for name, plan in plans.items()}
    return compare_generations(generation_problem(profile, workload=workload, **here), found)


def _check_compared(plans: Mapping[str, str | GenerationPlan]) -> None:
    check_number_compared(len(plans))
    for plan in plans.values():
        check_plan_label(plan)


def _called(name: str, problem: GenerationProblem) -> GenerationPlan:
    if name == BEST:
        return find_best_generation(problem).plan
    return price_generation_baselines(Book(problem=problem), labels=(name,))[name].plan


def rank_cards_to_generate(
    profile: GenerationProfile,
    cards: Sequence[str],
    *,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    order: Order = "speed",
    prices: PriceList | None = None,
    progress: Progress | None = None,
    beside: Beside | None = None,
) -> tuple[CardAnswer, ...]:
    """Cards of the table by tokens per second, or by the rent of a million tokens."""
    check_one_device(goal)
    GenerationPlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    alike = workload.as_if_equal(max_sequence_length=profile.max_sequence_length)

    def find(budget_bytes: int, card: Machine) -> Found:
        here: dict[str, Any] = {"goal": replace(goal, device_budget_bytes=budget_bytes), "machine": card}
        best = find_best_generation(generation_problem(profile, workload=alike, **here))
        if alike is not workload:
            best = generation_problem(profile, workload=workload, **here).priced("chosen", best.plan)
        return best, generation_label(best.plan)

    return rank(
        find,
        read_cards(cards, beside=beside_in(goal) | (beside or {})),
        most_bytes=goal.device_budget_bytes,
        num_tokens=workload.total_new_tokens,
        prices=prices or read_prices(),
        order=order,
        progress=progress,
    )


def reprice_generation_profiled(
    profile: GenerationProfile,
    plan: GenerationPlan,
    *,
    change: Mapping[str, Any] | Sequence[str],
    machine: Machine,
    workload: GenerationWorkload,
    goal: GenerationGoal,
    calibration: Mapping[str, Any] | None = None,
) -> RepricedGeneration:
    """The plan after one edit. change: a part of a plan's JSON, or texts: ``["kv_cache.dtype=int8"]``."""
    GenerationPlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    problem = generation_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    part = change if isinstance(change, Mapping) else read_generation_change(change)
    return reprice_generation(problem, plan, change=part)
