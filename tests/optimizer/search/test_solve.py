"""The solver against exhaustive enumeration, and the promises it makes for every budget."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.errors import NoFeasiblePlan
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem, techniques_of
from tests.optimizer.search.synthetic import synthetic_problem


def with_budget(problem: SearchProblem, budget_bytes: int) -> SearchProblem:
    return replace(problem, goal=replace(problem.goal, device_budget_bytes=budget_bytes))


def price_every_plan(problem: SearchProblem):
    return [
        problem.price(setting.plan(per_block))
        for setting in problem.settings()
        for per_block in product(problem.choices, repeat=problem.num_blocks)
    ]


@pytest.mark.parametrize("copy_ms_per_mib", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(("num_blocks", "global_batch_size"), [(3, 2), (4, 2), (5, 1)])
def test_small_problems_are_solved_as_well_as_by_trying_every_plan(num_blocks, global_batch_size, copy_ms_per_mib):
    problem = synthetic_problem(
        budget_mib=1, num_blocks=num_blocks, global_batch_size=global_batch_size, copy_ms_per_mib=copy_ms_per_mib
    )
    predictions = price_every_plan(problem)
    highs = [prediction.device_peak_high_bytes for prediction in predictions]
    for part in range(9):
        budgeted = with_budget(problem, min(highs) + (max(highs) - min(highs)) * part // 8)
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        assert search(budgeted).chosen.prediction.step_ms == best_ms


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "weight_mib": st.sampled_from([2, 20]),
            "saved_mib": st.sampled_from([10, 60]),
            "input_mib": st.sampled_from([1, 8]),
            "loss_mib": st.sampled_from([5, 120]),
            "copy_ms_per_mib": st.sampled_from([0.05, 0.4, 3.0]),
        }
    ),
    num_blocks=st.sampled_from([5, 9, 14]),
    allow_lossy=st.booleans(),
)
def test_more_budget_is_never_slower(sizes, num_blocks, allow_lossy):
    problem = synthetic_problem(
        budget_mib=1, num_blocks=num_blocks, global_batch_size=4, allow_lossy=allow_lossy, **sizes
    )
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem)
    smallest_bytes = caught.value.fields["smallest_feasible_bytes"]
    before_ms = float("inf")
    for part in range(9):
        step_ms = search(with_budget(problem, smallest_bytes * (6 + part) // 6)).chosen.prediction.step_ms
        assert step_ms <= before_ms
        before_ms = step_ms


@pytest.mark.parametrize("budget_mib", [700, 900, 1200, 2000])
def test_the_chosen_plan_is_never_slower_than_a_baseline_that_fits(budget_mib):
    result = search(synthetic_problem(budget_mib=budget_mib, num_blocks=12, global_batch_size=4))
    fitting = [baseline for baseline in result.baselines.values() if baseline.verdict == "fits"]
    assert all(result.chosen.prediction.step_ms <= baseline.prediction.step_ms for baseline in fitting)


def test_the_upper_end_of_the_interval_honours_the_budget_to_the_byte():
    generous = search(synthetic_problem(budget_mib=400, num_blocks=4, forbid=("offload",))).chosen.prediction
    problem = with_budget(
        synthetic_problem(budget_mib=400, num_blocks=4, forbid=("offload",)), generous.device_peak_high_bytes
    )
    assert search(problem).chosen.prediction.step_ms == generous.step_ms
    smaller = search(with_budget(problem, generous.device_peak_high_bytes - 1)).chosen.prediction
    assert smaller.device_peak_high_bytes < generous.device_peak_high_bytes
    assert smaller.step_ms > generous.step_ms


def test_the_same_problem_gives_the_same_result():
    problem = synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4, allow_lossy=True)
    assert search(problem).to_json() == search(problem).to_json()


@pytest.mark.parametrize("forbidden", ["recompute", "offload", "bf16", "8bit_optimizer", "accumulate"])
def test_a_forbidden_technique_is_not_used(forbidden):
    problem = synthetic_problem(
        budget_mib=900, num_blocks=8, global_batch_size=4, allow_lossy=True, forbid=(forbidden,)
    )
    result = search(problem)
    assert forbidden not in techniques_of(result.chosen.plan)
    assert all(forbidden not in techniques_of(point.plan) for point in result.frontier)


def test_each_technique_is_what_some_budget_needs():
    """Without this, a solver that never uses a technique would pass the test above."""
    used = set()
    for budget_mib in (200, 260, 330, 420, 560, 640, 900):
        for copy_ms_per_mib in (0.1, 3.0):
            problem = synthetic_problem(
                budget_mib=budget_mib,
                num_blocks=8,
                global_batch_size=4,
                allow_lossy=True,
                copy_ms_per_mib=copy_ms_per_mib,
            )
            try:
                used.update(techniques_of(search(problem).chosen.plan))
            except NoFeasiblePlan:
                continue
    assert used == {"recompute", "offload", "bf16", "8bit_optimizer", "accumulate"}


def test_lossy_choices_are_taken_only_when_allowed():
    assert search(synthetic_problem(budget_mib=600, num_blocks=8)).chosen.plan.is_lossless
    assert not search(synthetic_problem(budget_mib=600, num_blocks=8, allow_lossy=True)).chosen.plan.is_lossless


def test_what_a_machine_cannot_do_is_not_chosen():
    problem = synthetic_problem(budget_mib=600, num_blocks=8, allow_lossy=True)
    limited = replace(problem, can_bf16=False, can_8bit=False)
    assert search(limited).chosen.plan.is_lossless


def test_the_host_budget_is_honoured():
    problem = synthetic_problem(budget_mib=600, num_blocks=12, copy_ms_per_mib=0.1)
    free = search(problem).chosen.prediction.host_peak_bytes
    assert free > 0
    tight = replace(problem, host_budget_bytes=free // 2)
    assert 0 < search(tight).chosen.prediction.host_peak_bytes <= free // 2
    assert search(replace(problem, host_budget_bytes=0)).chosen.plan.activations.count("offload") == 0


def test_deep_models_are_searched_with_few_prices():
    problem = synthetic_problem(budget_mib=7000, num_blocks=80, global_batch_size=8, allow_lossy=True)
    asked = []

    def counting(plan):
        asked.append(plan)
        return problem.price(plan)

    search(replace(problem, price=counting))
    assert len(asked) < 500


def test_blocks_that_keep_stand_last():
    per_block = search(
        synthetic_problem(budget_mib=640, num_blocks=12, forbid=("offload",))
    ).chosen.plan.activations.per_block
    num_keep = per_block.count("keep")
    assert 0 < num_keep < 12
    assert per_block[-num_keep:] == ("keep",) * num_keep
