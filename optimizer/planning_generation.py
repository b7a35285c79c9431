"""What ``planning.py`` answers of training, here of a batch generation: plans side by side, cards ranked, a plan after an edit.

Torch-free. A search sees every prompt as the longest, since a price grows with the number of lengths; what is shown is priced
with all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optimizer.errors import InvalidInput
from optimizer.estimating import BEST
from optimizer.estimating_generation import check_plan_label
from optimizer.hardware.machine import Machine
from optimizer.hardware.prices import PriceList, read_prices
from optimizer.plan.generation_knobs import read_generation_change
from optimizer.plan.inference import InferencePlan
from optimizer.profile.inference import InferenceProfile
from optimizer.search.cards import CardAnswer, Found, Order, Progress, rank, read_cards
from optimizer.search.inference.baselines import price_inference_baselines
from optimizer.search.inference.compare import (
    GenerationComparison,
    RepricedGeneration,
    compare_generations,
    reprice_generation,
)
from optimizer.search.inference.frontier import inference_label
from optimizer.search.inference.problem import InferenceProblem
from optimizer.search.inference.search import find_best_generation, inference_problem
from optimizer.search.inference.solve import Book
from optimizer.workload import InferenceGoal, InferenceWorkload

MAX_COMPARED = 6


def compare_generations_profiled(
    profile: InferenceProfile,
    plans: Mapping[str, str | InferencePlan],
    *,
    machine: Machine,
    workload: InferenceWorkload,
    goal: InferenceGoal,
    calibration: Mapping[str, Any] | None = None,
) -> GenerationComparison:
    """plans: by the name to show, a plan, a baseline's label or ``best``."""
    if not 2 <= len(plans) <= MAX_COMPARED:
        raise InvalidInput(
            f"{len(plans)} plans are to be compared; allowed: 2 to {MAX_COMPARED} different ones",
            field="compare",
            value=len(plans),
            allowed={"minimum": 2, "maximum": MAX_COMPARED},
        )
    for plan in plans.values():
        check_plan_label(plan)
    here: dict[str, Any] = {"goal": goal, "machine": machine, "calibration": calibration}
    InferencePlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    alike = workload.as_if_equal(max_sequence_length=profile.max_sequence_length)
    bound = inference_problem(profile, workload=alike, **here)
    found = {name: plan if isinstance(plan, InferencePlan) else _called(plan, bound) for name, plan in plans.items()}
    return compare_generations(inference_problem(profile, workload=workload, **here), found)


def _called(name: str, problem: InferenceProblem) -> InferencePlan:
    if name == BEST:
        return find_best_generation(problem).plan
    return price_inference_baselines(Book(problem=problem), labels=(name,))[name].plan


def rank_cards_to_generate(
    profile: InferenceProfile,
    cards: Sequence[str],
    *,
    workload: InferenceWorkload,
    goal: InferenceGoal,
    order: Order = "speed",
    prices: PriceList | None = None,
    progress: Progress | None = None,
) -> tuple[CardAnswer, ...]:
    """Cards of the table by tokens per second, or by the rent of a million tokens."""
    InferencePlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    alike = workload.as_if_equal(max_sequence_length=profile.max_sequence_length)

    def find(budget_bytes: int, card: Machine) -> Found:
        here: dict[str, Any] = {"goal": replace(goal, device_budget_bytes=budget_bytes), "machine": card}
        best = find_best_generation(inference_problem(profile, workload=alike, **here))
        if alike is not workload:
            best = inference_problem(profile, workload=workload, **here).priced("chosen", best.plan)
        return best, inference_label(best.plan)

    return rank(
        find,
        read_cards(cards),
        most_bytes=goal.device_budget_bytes,
        num_tokens=workload.total_new_tokens,
        prices=prices or read_prices(),
        order=order,
        progress=progress,
    )


def reprice_generation_profiled(
    profile: InferenceProfile,
    plan: InferencePlan,
    *,
    change: Mapping[str, Any] | Sequence[str],
    machine: Machine,
    workload: InferenceWorkload,
    goal: InferenceGoal,
    calibration: Mapping[str, Any] | None = None,
) -> RepricedGeneration:
    """The plan after one edit. change: a part of a plan's JSON, or texts: ``["kv_cache.dtype=int8"]``."""
    InferencePlan().check(workload=workload, max_sequence_length=profile.max_sequence_length)
    problem = inference_problem(profile, workload=workload, goal=goal, machine=machine, calibration=calibration)
    part = change if isinstance(change, Mapping) else read_generation_change(change)
    return reprice_generation(problem, plan, change=part)
