"""The solver against exhaustive enumeration, and the promises it makes for every budget."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.synthetic import synthetic_problem
from optimizer.base.errors import NoFeasiblePlan
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.workload import Adapter


def with_budget(problem: SearchProblem, budget_bytes: int) -> SearchProblem:
    return replace(problem, goal=replace(problem.goal, device_budget_bytes=budget_bytes))


def best_at_budgets(
    problem: SearchProblem, predictions: list[Any], *, num_budgets: int
) -> Iterator[tuple[SearchProblem, float]]:
    """Budgets from smallest to largest peak, each with the least step time of all plans that fit."""
    highs = [prediction.device_peak_high_bytes for prediction in predictions if problem.fits_elsewhere(prediction)]
    for part in range(num_budgets):
        budgeted = with_budget(problem, min(highs) + (max(highs) - min(highs)) * part // (num_budgets - 1))
        yield budgeted, min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))


@pytest.mark.breadth
@pytest.mark.parametrize("copy_ms_per_mib", [0.1, 0.5, 2.0])
@pytest.mark.parametrize(("num_blocks", "global_batch_size"), [(3, 2), (4, 1)])
def test_small_problems_are_solved_as_well_as_by_trying_every_plan(
    num_blocks: int, global_batch_size: int, copy_ms_per_mib: float
) -> None:
    """But for half a percent: counts of chunks between those tried first are looked at only beside the best plan."""
    problem = synthetic_problem(
        budget_mib=1, num_blocks=num_blocks, global_batch_size=global_batch_size, copy_ms_per_mib=copy_ms_per_mib
    )
    problem = replace(problem, price=cache(problem.price))
    predictions = [problem.price(plan) for plan in every_plan(problem, fractions=(0.25, 0.5, 0.75, 1.0), chunks=(1, 2, 8))]
    for budgeted, best_ms in best_at_budgets(problem, predictions, num_budgets=9):
        assert search(budgeted).chosen.prediction.step_ms <= best_ms * 1.005


@pytest.mark.breadth
@pytest.mark.parametrize("allow_lossy", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (5, {"weight_mib": 2, "saved_mib": 10, "input_mib": 1, "loss_mib": 120, "copy_ms_per_mib": 0.05}),
        (9, {"weight_mib": 20, "saved_mib": 60, "input_mib": 8, "loss_mib": 5, "copy_ms_per_mib": 3.0}),
        (14, {"weight_mib": 20, "saved_mib": 10, "input_mib": 1, "loss_mib": 5, "copy_ms_per_mib": 0.4}),
    ],
)
def test_more_budget_is_never_slower(num_blocks: int, sizes: dict[str, Any], allow_lossy: bool) -> None:
    """But for half a percent, where the plans of two budgets differ in several levers at once."""
    problem = synthetic_problem(
        budget_mib=1, num_blocks=num_blocks, global_batch_size=4, allow_lossy=allow_lossy, **sizes
    )
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem)
    smallest_bytes = caught.value.fields["smallest_feasible_bytes"]
    before_ms = float("inf")
    for part in range(9):
        step_ms = search(with_budget(problem, smallest_bytes * (6 + part) // 6)).chosen.prediction.step_ms
        assert step_ms <= before_ms * 1.005
        before_ms = min(step_ms, before_ms)


@pytest.mark.parametrize("budget_mib", [250, 400, 700, 900, 1200, 2000])
def test_the_chosen_plan_is_never_slower_than_a_baseline_that_fits(budget_mib: int) -> None:
    result = search(synthetic_problem(budget_mib=budget_mib, num_blocks=12, global_batch_size=4))
    fitting = [baseline for baseline in result.baselines.values() if baseline.verdict == "fits"]
    assert all(result.chosen.prediction.step_ms <= baseline.prediction.step_ms for baseline in fitting)


@pytest.mark.parametrize("budget_mib", [130, 300, 600, 1000, 1500, 2200])
@pytest.mark.parametrize("copy_ms_per_mib", [0.1, 3.0])
def test_the_chosen_plan_is_never_slower_than_any_single_technique_that_fits(
    budget_mib: int, copy_ms_per_mib: float
) -> None:
    problem = synthetic_problem(
        budget_mib=budget_mib,
        num_blocks=8,
        global_batch_size=4,
        allow_lossy=True,
        max_grad_norm=None,
        disk_budget_mib=10**6,
        remote_budget_mib=10**6,
        copy_ms_per_mib=copy_ms_per_mib,
    )
    predictions = [problem.price(plan) for plan in single_technique_plans(problem)]
    assert len(predictions) > 100
    fitting_ms = [prediction.step_ms for prediction in predictions if problem.fits(prediction)]
    assert search(problem).chosen.prediction.step_ms <= min(fitting_ms, default=float("inf"))


def single_technique_plans(problem: SearchProblem) -> Iterator[Any]:
    """Plain training with one thing changed, in every strength; gradients come along where state or weights must have them."""
    plain, depth = OuterPlan(micro_batch_size=4, accumulation_steps=1), problem.num_blocks
    fractions = [step / 16 for step in range(1, 17)]
    settings = [
        plain,
        OuterPlan(micro_batch_size=2, accumulation_steps=2),
        OuterPlan(micro_batch_size=1, accumulation_steps=4),
        *(replace(plain, num_chunks=2**power) for power in range(1, 6)),
        replace(plain, gradients="consume"),
        replace(plain, gradients="host"),
        *(replace(plain, gradients="host", state_place="host", state_fraction=part) for part in fractions),
        *(replace(plain, gradients="host", state_place="disk", state_fraction=part) for part in fractions),
        *(
            replace(plain, gradients="host", state_place="host", weights_place="host", prefetch=number)
            for number in range(4)
        ),
        replace(plain, dtype="bf16"),
        replace(plain, autocast="bf16"),
        replace(plain, bits=8),
    ]
    yield from (setting.plan(("keep",) * depth) for setting in settings)
    keep: tuple[BlockChoice, ...] = ("keep",)
    for choice in problem.choices[1:]:
        for count in range(1, depth + 1):
            yield plain.plan((choice,) * count + keep * (depth - count))
            yield plain.plan(keep * (depth - count) + (choice,) * count)


def test_the_upper_end_of_the_interval_honours_the_budget_to_the_byte() -> None:
    generous = search(synthetic_problem(budget_mib=400, num_blocks=4, forbid=("offload",))).chosen.prediction
    problem = with_budget(
        synthetic_problem(budget_mib=400, num_blocks=4, forbid=("offload",)), generous.device_peak_high_bytes
    )
    assert search(problem).chosen.prediction.step_ms == generous.step_ms
    smaller = search(with_budget(problem, generous.device_peak_high_bytes - 1)).chosen.prediction
    assert smaller.device_peak_high_bytes < generous.device_peak_high_bytes
    assert smaller.step_ms > generous.step_ms


def test_the_same_problem_gives_the_same_result() -> None:
    problem = synthetic_problem(budget_mib=900, num_blocks=12, global_batch_size=4, allow_lossy=True)
    assert search(problem).to_json() == search(problem).to_json()


@pytest.mark.breadth
@pytest.mark.parametrize("forbidden", [name for name in get_args(Technique) if name != "quantize_frozen"])
def test_a_forbidden_technique_is_not_used(forbidden: str) -> None:
    problem = synthetic_problem(
        budget_mib=300, num_blocks=8, global_batch_size=4, allow_lossy=True, forbid=(forbidden,), max_grad_norm=None
    )
    result = search(problem)
    assert forbidden not in result.chosen.plan.techniques
    assert all(forbidden not in point.plan.techniques for point in result.frontier)


@pytest.mark.parametrize(
    ("how", "needed"),
    [
        ({"budget_mib": 60, "allow_lossy": True}, {"bf16", "offload_gradients", "offload_optimizer", "stream_weights"}),
        ({"budget_mib": 560, "allow_lossy": True, "copy_ms_per_mib": 3.0}, {"autocast", "8bit_optimizer"}),
        ({"budget_mib": 130, "allow_lossy": True, "forbid": ("recompute",)}, {"offload", "compress"}),
        ({"budget_mib": 330}, {"chunked_loss", "offload"}),
        ({"budget_mib": 330, "copy_ms_per_mib": 3.0}, {"recompute", "accumulate"}),
        (
            {"budget_mib": 400, "forbid": ("offload_gradients", "accumulate"), "max_grad_norm": None},
            {"consume_gradients"},
        ),
        ({"budget_mib": 200, "host_budget_mib": 120, "disk_budget_mib": 10**6}, {"disk", "offload_optimizer"}),
        (
            {"budget_mib": 500, "host_budget_mib": 0, "remote_budget_mib": 10**6, "forbid": ("recompute",)},
            {"remote", "offload"},
        ),
    ],
)
def test_each_technique_is_what_some_budget_needs(how: dict[str, Any], needed: set[str]) -> None:
    """Without this, a solver that never uses a technique would pass the test above."""
    assert needed <= techniques_taken(**how)


def techniques_taken(**how: Any) -> set[str]:
    try:
        return set(search(synthetic_problem(num_blocks=8, global_batch_size=4, **how)).chosen.plan.techniques)
    except NoFeasiblePlan:
        return set()


def test_lossy_choices_are_taken_only_when_allowed() -> None:
    assert search(synthetic_problem(budget_mib=600, num_blocks=8)).chosen.plan.is_lossless
    assert not search(synthetic_problem(budget_mib=600, num_blocks=8, allow_lossy=True)).chosen.plan.is_lossless


def test_what_a_machine_cannot_do_is_not_chosen() -> None:
    problem = synthetic_problem(budget_mib=600, num_blocks=8, allow_lossy=True)
    limited = replace(problem, representations=frozenset({"fp32"}), unavailable=frozenset({"8bit_optimizer"}))
    assert search(limited).chosen.plan.is_lossless


def test_the_host_budget_is_honoured() -> None:
    problem = synthetic_problem(budget_mib=600, num_blocks=12, copy_ms_per_mib=0.1)
    free = search(problem).chosen.prediction.host_peak_bytes
    assert free > 0
    tight = replace(problem, host_budget_bytes=free // 2)
    assert 0 < search(tight).chosen.prediction.host_peak_bytes <= free // 2
    assert search(replace(problem, host_budget_bytes=0)).chosen.plan.activations.count("offload") == 0


def test_deep_models_are_searched_with_few_prices() -> None:
    problem = synthetic_problem(budget_mib=7000, num_blocks=80, global_batch_size=8, allow_lossy=True)
    asked = []

    def counting(plan: Plan) -> Any:
        asked.append(plan)
        return problem.price(plan)

    search(replace(problem, price=counting))
    assert len(asked) < 1000


def test_blocks_that_keep_stand_last() -> None:
    per_block = search(
        synthetic_problem(
            budget_mib=800, num_blocks=12, forbid=("offload", "chunked_loss", "offload_gradients", "accumulate")
        )
    ).chosen.plan.activations.per_block
    num_keep = per_block.count("keep")
    assert 0 < num_keep < 12
    assert per_block[-num_keep:] == ("keep",) * num_keep


def test_the_smallest_share_of_the_state_leaves_that_makes_room() -> None:
    problem = synthetic_problem(
        budget_mib=1, num_blocks=8, forbid=("recompute", "offload", "accumulate", "chunked_loss", "stream_weights")
    )
    plan_at = OuterPlan(micro_batch_size=2, accumulation_steps=1, gradients="host", state_place="host")
    halfway = problem.price(replace(plan_at, state_fraction=0.5).plan(("keep",) * 8))
    chosen = search(with_budget(problem, halfway.device_peak_high_bytes)).chosen
    assert chosen.plan.optimizer_state.fraction == 0.5
    assert chosen.prediction.step_ms == halfway.step_ms


def test_disk_is_used_only_for_what_the_host_has_no_room_for() -> None:
    how = {"budget_mib": 130, "num_blocks": 8, "disk_budget_mib": 10**6}
    assert "disk" not in search(synthetic_problem(**how)).chosen.plan.techniques
    tight = search(synthetic_problem(**how, host_budget_mib=200)).chosen
    assert "disk" in tight.plan.techniques
    assert tight.prediction.disk_peak_bytes > 0


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_the_budgets_of_farther_tiers_are_honoured(place: str) -> None:
    how = {"budget_mib": 400, "num_blocks": 8, "host_budget_mib": 0, "forbid": ("recompute", "chunked_loss")}
    free = search(synthetic_problem(**how, **{f"{place}_budget_mib": 10**6})).chosen.prediction
    used_bytes = getattr(free, f"{place}_peak_bytes")
    assert used_bytes > 0
    problem = replace(synthetic_problem(**how), **{f"{place}_budget_bytes": used_bytes - 1})
    tight = search(with_budget(problem, free.device_peak_high_bytes * 2)).chosen.prediction
    assert getattr(tight, f"{place}_peak_bytes") < used_bytes


def test_a_host_with_some_room_takes_what_it_can_before_the_disk() -> None:
    problem = synthetic_problem(
        budget_mib=400,
        num_blocks=8,
        host_budget_mib=80,
        disk_budget_mib=10**6,
        forbid=("recompute", "chunked_loss", "accumulate", "offload_gradients"),
    )
    plan = search(problem).chosen.plan
    assert plan.activations.count("offload") > 0
    assert plan.activations.count("offload_disk") > 0


def test_weights_under_adapters_are_streamed_and_quantized() -> None:
    problem = synthetic_problem(budget_mib=50, num_blocks=8, allow_lossy=True, adapter=Adapter())
    problem = replace(problem, representations=frozenset({"bf16", "bf16/nf4", "bf16/int4"}))
    settings = problem.settings()
    assert {setting.frozen for setting in settings} == {"same", "nf4", "int4"}
    streamed = OuterPlan(micro_batch_size=2, accumulation_steps=1, dtype="bf16", weights_place="host")
    assert problem.permits_setting(streamed)
    assert not problem.permits_setting(replace(streamed, dtype="fp32", autocast="bf16", bits=8, state_place="host"))


def test_without_clipping_gradients_can_be_consumed() -> None:
    how = {"num_blocks": 8, "global_batch_size": 1, "budget_mib": 330, "forbid": ("offload_gradients", "recompute")}
    assert search(synthetic_problem(**how, max_grad_norm=None)).chosen.plan.gradients.choice == "consume"
    clipped = search(synthetic_problem(**how)) if fits_somehow(synthetic_problem(**how)) else None
    assert clipped is None or clipped.chosen.plan.gradients.choice != "consume"


def fits_somehow(problem: SearchProblem) -> bool:
    try:
        search(problem)
    except NoFeasiblePlan:
        return False
    return True
