"""The search by bounds against enumeration, where both can be had: models whose blocks differ in kind."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.profiles import TINY
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.techniques import Technique
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.search.solver.guided import solve_guided
from optimizer.search.solver.pricebook import PriceBook
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

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
NUM_BUDGETS = 9
WORKLOAD = TrainingWorkload(sequence_length=256, global_batch_size=4)


@cache
def _profile() -> Profile:
    extent = Extent(representations=("fp32",), shapes=((WORKLOAD.global_batch_size, WORKLOAD.sequence_length),))
    return profile_model(read_model_spec(TINY["gemma3_text"]), extent=extent)


@pytest.mark.parametrize("slowness", [1.0, 1e-3])
def test_the_bound_holds_for_blocks_of_two_kinds_and_the_answer_is_near_the_best(slowness: float) -> None:
    """It is the best but for rounding, also in four blocks, of which lines are coarse; such models are searched otherwise."""
    machine = table_machine("RTX 3060 12GB")
    rates = replace(machine.rates, memory_bytes_per_s=machine.rates.memory_bytes_per_s * slowness)
    problem = training_problem(
        _profile(),
        workload=WORKLOAD,
        goal=Goal(device_budget_bytes=1, forbid=FORBIDDEN),
        machine=replace(machine, rates=rates),
    )
    problem = replace(problem, price=cache(problem.price))
    assert problem.kinds[0] == problem.kinds[2] != problem.kinds[1]
    predictions = [problem.price(plan) for plan in every_plan(problem)]
    highs = sorted(prediction.device_peak_high_bytes for prediction in predictions)
    for part in range(NUM_BUDGETS):
        budgeted = problem.with_budget(highs[0] + (highs[-1] - highs[0]) * part // (NUM_BUDGETS - 1))
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        book = PriceBook(budgeted)
        solve_guided(book, problem.relax)
        assert book.floor_ms <= best_ms <= book.best_step_ms <= 1.001 * best_ms
