"""The search by bounds against enumeration, where both can be had: models whose blocks differ in kind."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.profiles import tiny_profile
from optimizer.hardware.devices import table_machine
from optimizer.search.guided import solve_guided
from optimizer.search.pricebook import PriceBook
from optimizer.search.search import training_problem
from optimizer.workload import Goal, Technique, TrainingWorkload

FORBIDDEN: tuple[Technique, ...] = (
    "accumulate",
    "chunked_loss",
    "consume_gradients",
    "offload_gradients",
    "offload_optimizer",
    "stream_weights",
    "disk",
    "remote",
)
NUM_BUDGETS = 7
WORKLOAD = TrainingWorkload(sequence_length=256, global_batch_size=4)


@pytest.mark.parametrize("slowness", [1.0, 1e-3])
def test_the_bound_holds_for_blocks_of_two_kinds_and_the_answer_is_near_the_best(slowness):
    """Within six percent in four blocks, of which lines are coarse: models so shallow are searched otherwise."""
    machine = table_machine("RTX 3060 12GB")
    rates = replace(machine.rates, memory_bytes_per_s=machine.rates.memory_bytes_per_s * slowness)
    problem = training_problem(
        tiny_profile("gemma3_text"),
        workload=WORKLOAD,
        goal=Goal(device_budget_bytes=1, forbid=FORBIDDEN),
        machine=replace(machine, rates=rates),
    )
    problem = replace(problem, price=cache(problem.price))
    predictions = [problem.price(plan) for plan in every_plan(problem)]
    highs = sorted(prediction.device_peak_high_bytes for prediction in predictions)
    for part in range(NUM_BUDGETS):
        budgeted = problem.with_budget(highs[0] + (highs[-1] - highs[0]) * part // (NUM_BUDGETS - 1))
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        book = PriceBook(budgeted)
        solve_guided(book, problem.relax)
        assert book.floor_ms <= best_ms <= book.best_step_ms <= 1.06 * best_ms
