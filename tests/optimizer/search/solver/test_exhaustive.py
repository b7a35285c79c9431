"""Small problems are answered exactly, and what the proof rests on holds."""

import random
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.small import compare, draw_budgets, draw_family, draw_machine
from benchmarks.search.synthetic import synthetic_problem
from optimizer.goal import Goal
from optimizer.plan.techniques import Technique
from optimizer.profile.profile import Profile
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.bounds import bound_of
from optimizer.search.solver.exhaustive import bound_of_setting
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.solver.space import MAX_ENUMERATED, count_arrangements, every_setting, few_settings
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=4)


@pytest.mark.breadth
@pytest.mark.parametrize("family_index", range(4))
def test_small_problems_drawn_by_chance_are_answered_as_by_trying_every_plan(
    family_index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.search.small.MAX_PLANS", 400)
    monkeypatch.setattr("benchmarks.search.small._real", _synthetic)
    draw = random.Random(f"tests {family_index}")
    family = draw_family(draw, models=("llama",))
    for _ in range(5):
        row = compare(draw_budgets(draw, family), family.plans)
        assert row["optimal"], row
        assert row["proven"], row


def _synthetic(draw: random.Random, _name: str) -> tuple[str, SearchProblem]:
    return "synthetic", synthetic_problem(
        budget_mib=1, num_blocks=draw.randint(2, 5), copy_ms_per_mib=draw.choice([0.1, 2.0])
    )


@pytest.mark.parametrize("seed", range(2))
def test_a_real_model_is_answered_as_by_trying_every_plan(llama_profile: Profile, seed: int) -> None:
    draw = random.Random(f"real {seed}")
    _, machine = draw_machine(draw)
    goal = Goal(device_budget_bytes=1, forbid=("accumulate", "chunked_loss", "offload_gradients", "stream_weights", "disk"))
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    problem = replace(problem, price=cache(problem.price), detail=None)
    plans = [(plan, problem.price(plan)) for plan in every_plan(problem)]
    highs = [prediction.device_peak_high_bytes for _, prediction in plans]
    for _ in range(5):
        row = compare(problem.with_budget(draw.randint(min(highs) - 1, max(highs))), plans)
        assert row["optimal"], row
        assert row["proven"], row


def test_the_settings_counted_are_those_that_brute_force_finds() -> None:
    problem = synthetic_problem(budget_mib=1, num_blocks=2, disk_budget_mib=10**6, allow_lossy=True)
    book = PriceBook(problem)
    found = {setting.plan(("offload",) * 2) for setting in every_setting(book)}
    assert found == set(every_plan(problem, per_block=("offload",) * 2))


def test_plans_without_copies_count_once_however_copies_would_be_compressed() -> None:
    allowed = ("recompute", "offload", "compress", "chunked_loss", "8bit_optimizer")
    forbid = tuple(name for name in get_args(Technique) if name not in allowed)
    problem = synthetic_problem(budget_mib=100, num_blocks=4, global_batch_size=4, allow_lossy=True, forbid=forbid)
    settings = few_settings(PriceBook(problem))
    assert settings is not None
    assert len(settings) * count_arrangements(problem) > MAX_ENUMERATED > len(set(every_plan(problem)))


def test_deep_problems_are_not_small() -> None:
    deep = synthetic_problem(budget_mib=1, num_blocks=40)
    assert count_arrangements(deep) == 4**40
    assert few_settings(PriceBook(deep)) is None


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_faster_than_the_bound_of_its_setting_or_of_the_problem(llama_profile: Profile, seed: int) -> None:
    draw = random.Random(f"bounds {seed}")
    _, machine = draw_machine(draw)
    goal = Goal(device_budget_bytes=1, allow_lossy=draw.random() < 0.5)
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    book = PriceBook(problem)
    settings = list(every_setting(book))
    whole_bound_ms = bound_of(book)
    for setting in draw.sample(settings, k=40):
        per_block = tuple(draw.choice(problem.choices) for _ in range(problem.num_blocks))
        step_ms = problem.price(setting.plan(per_block)).step_ms
        assert step_ms >= bound_of_setting(book, setting) * (1 - 1e-12)
        assert step_ms >= whole_bound_ms


def test_a_proven_answer_has_no_gap_and_others_report_theirs() -> None:
    small = search(synthetic_problem(budget_mib=100, num_blocks=2, forbid=("offload_optimizer", "stream_weights")))
    assert small.is_optimal
    assert small.gap == 0.0
    assert small.to_json()["is_optimal"] is True
    deep = search(synthetic_problem(budget_mib=600, num_blocks=12, copy_ms_per_mib=3.0))
    assert not deep.is_optimal
    assert deep.gap == deep.chosen.prediction.step_ms / deep.bound_step_ms - 1 > 0
    assert deep.to_json()["gap"] == deep.gap


def test_a_bound_above_the_answer_is_not_taken_for_a_proof() -> None:
    found = search(synthetic_problem(budget_mib=600, num_blocks=12, copy_ms_per_mib=3.0))
    for bound_step_ms in (None, found.chosen.prediction.step_ms + 1):
        unproven = replace(found, bound_step_ms=bound_step_ms)
        assert unproven.gap is None
        assert not unproven.is_optimal
        assert unproven.to_json()["bound_step_ms"] == bound_step_ms


def test_the_same_plan_is_kept_when_memory_is_plenty() -> None:
    """A budget above everything is no reason to do anything."""
    problem = synthetic_problem(budget_mib=10**6, num_blocks=2, max_grad_norm=None)
    assert search(problem).chosen.plan == OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("keep",) * 2)
