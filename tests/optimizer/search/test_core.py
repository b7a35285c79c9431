"""Contents of a search result besides the chosen plan."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.search.synthetic import MIB, synthetic_problem
from optimizer.plan.plan import Plan
from optimizer.search.answer.baselines import BASELINES, price_baselines
from optimizer.search.answer.frontier import plan_label
from optimizer.search.answer.pareto import MAX_POINTS
from optimizer.search.check.card_fit import Outpaced
from optimizer.search.check.verify import VerificationFailed, verify_plan
from optimizer.search.core import find_chosen, search, search_budgets
from optimizer.search.problem import OuterPlan, divisors


def test_no_point_of_the_frontier_is_beaten_by_another() -> None:
    problem = synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4, copy_ms_per_mib=3.0)
    frontier = search(problem).frontier
    highs = [point.prediction.device_peak_high_bytes for point in frontier]
    times = [point.prediction.step_ms for point in frontier]
    assert highs == sorted(set(highs))
    assert times == sorted(set(times), reverse=True)
    assert 4 <= len(frontier) <= MAX_POINTS


@pytest.mark.parametrize("num_blocks", [4, 12, 24])
def test_a_search_with_a_limit_finds_the_same_plan_or_none(num_blocks: int) -> None:
    problem = synthetic_problem(budget_mib=900, num_blocks=num_blocks, global_batch_size=4, copy_ms_per_mib=3.0)
    chosen = find_chosen(problem)
    assert find_chosen(problem, most_ms=1.01 * chosen.prediction.step_ms).plan == chosen.plan
    with pytest.raises(Outpaced):
        find_chosen(problem, most_ms=0.9 * chosen.prediction.step_ms)


def test_the_chosen_plan_stands_on_the_frontier() -> None:
    for budget_mib in (620, 900, 1500):
        result = search(synthetic_problem(budget_mib=budget_mib, num_blocks=12, global_batch_size=4))
        chosen = result.chosen.prediction
        assert any(
            point.prediction.step_ms == chosen.step_ms
            and point.prediction.device_peak_high_bytes <= chosen.device_peak_high_bytes
            for point in result.frontier
        )


def test_the_frontier_spans_budgets_on_both_sides_of_the_chosen_plan() -> None:
    problem = synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4)
    highs = [point.prediction.device_peak_high_bytes for point in search(problem).frontier]
    assert highs[0] < problem.goal.device_budget_bytes < highs[-1]


def test_no_plan_is_faster_than_the_bound() -> None:
    result = search(synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4, allow_lossy=True))
    everything = [result.chosen, *result.frontier]
    assert all(priced.prediction.step_ms >= result.bound_step_ms for priced in everything)
    assert min(point.prediction.step_ms for point in result.frontier) == result.unlimited_step_ms


def test_the_baselines_are_what_their_names_say() -> None:
    baselines = price_baselines(synthetic_problem(budget_mib=900, num_blocks=5, global_batch_size=4))
    assert list(baselines) == list(BASELINES)
    assert baselines["keep_all"].plan.activations.per_block == ("keep",) * 5
    assert baselines["recompute_all"].plan.activations.per_block == ("recompute",) * 5
    assert baselines["offload_all"].plan.activations.per_block == ("offload",) * 5
    assert baselines["every_second"].plan.activations.per_block == ("recompute", "keep") * 2 + ("recompute",)
    assert baselines["accumulate_all"].plan.batch.accumulation_steps == 4
    assert baselines["every_third"].plan.activations.per_block == ("recompute", "keep", "keep", "recompute", "keep")
    assert baselines["every_root"].plan.activations.per_block == ("recompute", "keep") * 2 + ("recompute",)
    others = [priced.plan for label, priced in baselines.items() if label != "accumulate_all"]
    assert all(plan.batch.micro_batch_size == 4 for plan in others)


def test_torchs_own_knobs_keep_what_their_memory_models_allow() -> None:
    for budget_mib in (300, 900, 3000):
        problem = synthetic_problem(budget_mib=budget_mib, num_blocks=20, weight_mib=4)
        baselines = price_baselines(problem)
        kept = baselines["torch_memory_budget"].plan.activations.count("keep")
        assert kept % 2 == 0
        more = baselines["torch_memory_budget"].plan
        assert baselines["torch_memory_budget"].verdict == "fits" or more.activations.count("keep") == 0
        counted = baselines["torch_sac_milp"].plan.activations.count("keep")
        # It does not count the optimizer's state.
        assert counted >= kept or counted == 20
    assert (kept, counted) == (20, 20)


def test_baselines_are_reported_also_where_they_are_forbidden_or_do_not_fit() -> None:
    result = search(synthetic_problem(budget_mib=500, num_blocks=8, global_batch_size=4, forbid=("offload",)))
    assert result.baselines["offload_all"].plan.activations.count("offload") == 8
    assert result.baselines["keep_all"].verdict == "does_not_fit"


def test_a_baseline_over_the_host_budget_does_not_fit() -> None:
    result = search(synthetic_problem(budget_mib=2000, num_blocks=8, host_budget_mib=1))
    assert result.baselines["keep_all"].verdict == "fits"
    assert result.baselines["offload_all"].verdict == "does_not_fit"


def test_the_explanation_ends_with_what_stays_free() -> None:
    explanation = search(synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4)).explanation
    assert explanation[-1].endswith("of the budget stay free")
    assert any("keep-all, saves" in sentence for sentence in explanation)


def test_settings_are_the_divisors_of_the_batch() -> None:
    problem = synthetic_problem(budget_mib=900, global_batch_size=12)
    assert [setting.micro_batch_size for setting in problem.settings()] == [1, 2, 3, 4, 6, 12]
    assert all(setting.micro_batch_size * setting.accumulation_steps == 12 for setting in problem.settings())
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_lossy_settings_cross_dtype_and_bits() -> None:
    problem = synthetic_problem(budget_mib=900, global_batch_size=1, allow_lossy=True)
    found = {(setting.dtype, setting.bits) for setting in problem.settings()}
    assert found == {("fp32", 32), ("fp32", 8), ("bf16", 32), ("bf16", 8)}


def test_a_plans_label_says_what_it_does() -> None:
    setting = OuterPlan(micro_batch_size=2, accumulation_steps=4, dtype="bf16", bits=8)
    label = plan_label(setting.plan(("offload", "recompute", "recompute", "keep")))
    assert label == "keep 1, recompute 2, offload 1, micro-batch 2 x 4, bf16, 8-bit state"


def test_a_price_that_changes_between_askings_is_found_out() -> None:
    problem = synthetic_problem(budget_mib=900)
    asked = []

    def drifting(plan: Plan) -> Any:
        asked.append(plan)
        prediction = problem.price(plan)
        return replace(prediction, step_ms=prediction.step_ms + len(asked))

    with pytest.raises(VerificationFailed, match="costs differently when priced again"):
        search(replace(problem, price=drifting))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"device_peak_high_bytes": 2**50}, "may exceed the device budget within its interval"),
        ({"host_peak_bytes": 2**60}, "exceeds the host budget"),
        ({"device_bytes_by_category": {"weights": 1}}, "categories that do not add up"),
        ({"timeline": ()}, None),
        ({"device_peak_low_bytes": 2**50}, "a peak outside its own interval"),
    ],
)
def test_verification_says_what_is_wrong_with_a_prediction(change: dict[str, Any], complaint: str | None) -> None:
    problem = synthetic_problem(budget_mib=900)
    plan = OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("keep",) * 4)
    wrong = replace(problem.price(plan), **change)
    found = verify_plan(replace(problem, price=lambda _: wrong), plan=plan, prediction=wrong)
    assert any(complaint in text for text in found) if complaint else found == ()


def test_verification_reads_the_timeline_moment_by_moment() -> None:
    problem = synthetic_problem(budget_mib=900)
    plan = OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("keep",) * 4)
    prediction = problem.price(plan)
    spike = replace(prediction.timeline[3], bytes_by_category={"activations": 901 * MIB})
    wrong = replace(prediction, timeline=(*prediction.timeline[:3], spike, *prediction.timeline[4:]))
    found = verify_plan(replace(problem, price=lambda _: wrong), plan=plan, prediction=wrong)
    assert any("is over the device budget in forward" in text for text in found)
    assert any("has a timeline whose peak is" in text for text in found)


def test_verification_refuses_forbidden_techniques() -> None:
    problem = synthetic_problem(budget_mib=900, forbid=("recompute",))
    plan = OuterPlan(micro_batch_size=2, accumulation_steps=1, dtype="bf16").plan(("recompute",) * 4)
    found = verify_plan(problem, plan=plan, prediction=problem.price(plan))
    assert found == ("uses recompute, which is not allowed", "uses bf16, which is not allowed")


def test_answers_at_rising_budgets_are_never_slower_than_those_before() -> None:
    problem = synthetic_problem(budget_mib=1, num_blocks=10, allow_lossy=True, copy_ms_per_mib=1.5)
    budgets_bytes = [mib * MIB for mib in range(1, 600, 80)]
    results = search_budgets(problem, budgets_bytes)
    times = [result.chosen.prediction.step_ms for result in results.values()]
    assert list(results) == sorted(results)
    assert 0 < len(results) < len(budgets_bytes)
    assert times == sorted(times, reverse=True)


def test_a_search_is_not_slower_than_a_plan_it_knows() -> None:
    problem = synthetic_problem(budget_mib=600, num_blocks=12)
    best = search(problem).chosen
    assert search(problem, known=[best.plan]).chosen.prediction.step_ms <= best.prediction.step_ms
