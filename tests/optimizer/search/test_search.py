"""The search bound to the real estimator, on a real model's profile."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from optimizer.errors import NoFeasiblePlan
from optimizer.hardware.devices import table_machine
from optimizer.search.core import search
from optimizer.search.search import search_plans, training_problem
from optimizer.workload import Goal, TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=2)
MACHINE = table_machine("RTX 3060 12GB")
HEAVY_OPS = replace(MACHINE, rates=replace(MACHINE.rates, op_overhead_s=1e-9, memory_bytes_per_s=1e9))
"""So slow at computing that copies hide behind it."""
CPU = replace(MACHINE, device=replace(MACHINE.device, kind="cpu"))


@pytest.mark.parametrize("machine", [MACHINE, HEAVY_OPS, CPU], ids=["slow link", "fast link", "cpu"])
def test_the_answer_equals_that_of_pricing_every_plan_at_fifteen_budgets(llama_profile, machine):
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=machine)
    problem = replace(problem, price=cache(problem.price))
    predictions = [
        problem.price(setting.plan(per_block))
        for setting in problem.settings()
        for per_block in product(problem.choices, repeat=problem.num_blocks)
    ]
    highs = [prediction.device_peak_high_bytes for prediction in predictions]
    before_ms = float("inf")
    for part in range(15):
        budget_bytes = min(highs) + (max(highs) - min(highs)) * part // 14
        budgeted = replace(problem, goal=replace(problem.goal, device_budget_bytes=budget_bytes))
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        chosen_ms = search(budgeted).chosen.prediction.step_ms
        assert chosen_ms == pytest.approx(best_ms, rel=1e-12)
        assert chosen_ms <= before_ms
        before_ms = chosen_ms


def test_calibration_scales_time_and_leaves_bytes(llama_profile):
    goal = Goal(device_budget_bytes=2**30)
    plain = search_plans(llama_profile, workload=WORKLOAD, goal=goal, machine=MACHINE).chosen.prediction
    slowed = search_plans(
        llama_profile, workload=WORKLOAD, goal=goal, machine=MACHINE, calibration={"step_time_factor": 2.0}
    ).chosen.prediction
    assert slowed.step_ms == pytest.approx(2 * plain.step_ms)
    assert slowed.device_peak_bytes == plain.device_peak_bytes


def test_the_machines_free_host_memory_is_the_limit_unless_the_goal_says_less(llama_profile):
    machine = replace(MACHINE, host_memory_bytes=12345)
    assert (
        training_problem(
            llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=machine
        ).host_budget_bytes
        == 12345
    )
    goal = Goal(device_budget_bytes=1, host_budget_bytes=7)
    assert training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine).host_budget_bytes == 7


def test_8_bit_state_is_not_planned_for_a_machine_that_could_not_measure_it(llama_profile):
    rates = replace(MACHINE.rates, optimizer_elements_per_s={"adamw_32": 1e9})
    machine = replace(MACHINE, rates=rates)
    goal = Goal(device_budget_bytes=2**30, allow_lossy=True)
    result = search_plans(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    assert all(point.plan.optimizer_state.bits == 32 for point in result.frontier)


def test_the_named_smallest_budget_is_enough(llama_profile):
    with pytest.raises(NoFeasiblePlan) as caught:
        search_plans(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=MACHINE)
    smallest = Goal(device_budget_bytes=caught.value.fields["smallest_feasible_bytes"])
    assert search_plans(llama_profile, workload=WORKLOAD, goal=smallest, machine=MACHINE).chosen.verdict == "fits"
