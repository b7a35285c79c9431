"""Pinned decisions: kept by every plan that is found, the best of those that keep them, and refused where none can."""

from dataclasses import fields, replace
from typing import Any

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.synthetic import synthetic_problem
from optimizer.base.errors import InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.plan.pins.training import Pins, list_knobs_to_pin, read_pins
from optimizer.plan.plan import Plan
from optimizer.search.core import search
from optimizer.search.problem import SearchProblem


def pinned_problem(*pins: str, budget_mib: int = 260, **more: Any) -> SearchProblem:
    problem = synthetic_problem(budget_mib=budget_mib, allow_lossy=True, **more)
    return replace(problem, goal=replace(problem.goal, pins=read_pins(pins)))


PINNED = [
    ["optimizer_state.bits=8"],
    ["batch.micro_batch_size=1"],
    ["batch.accumulation_steps=1"],
    ["weights.dtype=bf16"],
    ["weights.dtype=fp32", "weights.autocast=off"],
    ["weights.place=host"],
    ["weights.place=host", "weights.prefetch=0"],
    ["gradients.choice=host"],
    ["gradients.choice=keep"],
    ["optimizer_state.place=host", "optimizer_state.fraction=0.5"],
    ["logits_and_loss.num_chunks=3"],
    ["activations.per_block=recompute"],
    ["activations.per_block=offload", "activations.compress=int8"],
    ["activations.per_block=recompute,offload,keep,selective"],
    ["allocator.expandable_segments=true"],
]


@pytest.mark.parametrize("pins", PINNED, ids=" ".join)
def test_every_plan_that_is_shown_keeps_what_is_pinned(pins: list[str]) -> None:
    problem = pinned_problem(*pins)
    found = search(problem)
    kept = [problem.goal.pins.broken_by(point.plan) for point in (found.chosen, *found.frontier)]
    assert kept == [None] * len(kept)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "pins",
    [
        ["optimizer_state.bits=8"],
        ["batch.micro_batch_size=1"],
        ["weights.place=host"],
        ["logits_and_loss.num_chunks=3"],
        ["activations.per_block=recompute"],
        ["activations.per_block=recompute,offload"],
        ["optimizer_state.place=host", "optimizer_state.fraction=0.5"],
    ],
    ids=" ".join,
)
def test_no_plan_that_keeps_the_pins_is_faster(pins: list[str]) -> None:
    problem = pinned_problem(*pins, num_blocks=2, budget_mib=100, forbid=("autocast", "fp16"))
    candidates = every_plan(problem, chunks=(1, 3), fractions=(0.5, 1.0), per_block=problem.pinned_blocks)
    plans = [plan for plan in candidates if problem.permits(plan)]
    fastest_ms = min(priced.step_ms for priced in map(problem.price, plans) if problem.fits(priced))
    assert search(problem).chosen.prediction.step_ms <= fastest_ms * 1.005


OF_ONE_RANK = {"layout.ranks"}
"""Decisions about one device of a team, which the search makes for each by itself: the rows that they override can be pinned."""


def test_every_knob_of_a_plan_can_be_pinned() -> None:
    plan = Plan.from_json({"batch": {"micro_batch_size": 1, "accumulation_steps": 1}, "activations": {"per_block": []}})
    knobs = [
        f"{category.name}.{knob.name}"
        for category in fields(plan)
        if category.name != "version"
        for knob in fields(getattr(plan, category.name))
        if f"{category.name}.{knob.name}" not in OF_ONE_RANK
    ]
    assert sorted(list_knobs_to_pin()) == sorted(knobs)


def test_the_smallest_budget_under_pins_is_enough_for_them() -> None:
    problem = pinned_problem("activations.per_block=keep", "optimizer_state.place=device", budget_mib=1)
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem)
    chosen = search(problem.with_budget(caught.value.fields["smallest_feasible_bytes"])).chosen
    assert problem.goal.pins.broken_by(chosen.plan) is None


def test_pins_are_read_from_text_and_from_json_alike() -> None:
    pins = read_pins(["optimizer_state.bits=8", "activations.per_block=recompute*2,keep"])
    assert pins.to_json() == {
        "optimizer_state": {"bits": 8},
        "activations": {"per_block": ["recompute", "recompute", "keep"]},
    }
    assert Pins().is_empty
    assert pins.blocks(3) == ("recompute", "recompute", "keep")
    assert read_pins(["activations.per_block=keep"]).blocks(3) == ("keep",) * 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer_state.bits", "is not understood; allowed: KNOB=VALUE"),
        ("speed=fast", "is not understood; allowed: KNOB=VALUE with one of layout.num_devices"),
        ("weights.dtype=fp8", "goal.pins.weights.dtype is 'fp8'; allowed: fp32, bf16, fp16"),
        ("optimizer_state.bits=many", "goal.pins.optimizer_state.bits is 'many'; allowed: 32, 8"),
        ("batch.micro_batch_size=2.5", "goal.pins.batch.micro_batch_size is '2.5'; allowed: an integer"),
        ("activations.per_block=kept", "goal.pins.activations.per_block[0] is 'kept'; allowed: keep, recompute"),
    ],
)
def test_a_pin_that_is_no_knob_or_no_value_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        read_pins([text])
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("pins", "goal", "words"),
    [
        ("activations.per_block=recompute", {"forbid": ("recompute",)}, "needs 'recompute', and goal.forbid names that"),
        ("weights.dtype=bf16", {}, "goal.pins.weights.dtype is bf16, which changes the numbers"),
        ("optimizer_state.place=disk", {"forbid": ("disk",)}, "needs 'disk', and goal.forbid names that"),
    ],
)
def test_a_pin_against_the_rest_of_the_goal_is_refused(pins: str, goal: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        Goal(device_budget_bytes=1, pins=read_pins([pins]), **goal)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["batch.micro_batch_size=3"], "the batch of 2 is cut evenly: allowed are 1, 2"),
        (["activations.per_block=keep,keep"], "the model has 4 blocks"),
        (["gradients.choice=keep", "optimizer_state.place=host"], "no plan keeps every pin"),
        (["weights.place=host", "optimizer_state.place=device"], "state must then be wholly on the host or the disk"),
        (["optimizer_state.place=disk"], "disk is not to be had on this machine for this job"),
        (["logits_and_loss.num_chunks=0"], "plan.logits_and_loss.num_chunks is 0"),
        (["batch.micro_batch_size=2", "batch.accumulation_steps=2"], "no plan keeps every pin"),
    ],
)
def test_pins_that_no_plan_can_keep_are_refused_with_the_reason(pins: list[str], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        search(pinned_problem(*pins))
    assert words in caught.value.message


def test_pins_that_need_more_of_the_host_than_there_is_say_so() -> None:
    with pytest.raises(InvalidPlan) as caught:
        search(pinned_problem("optimizer_state.place=host", "optimizer_state.fraction=1", host_budget_mib=1))
    assert "needs more than 1.00 MiB on the host" in caught.value.message


def test_a_goal_says_how_far_its_loss_of_quality_may_go() -> None:
    problem = synthetic_problem(budget_mib=60, num_blocks=8, allow_lossy=True)
    rounding = replace(problem, goal=replace(problem.goal, most_loss="rounding"))
    names = ("compress", "bf16", "fp16", "autocast", "8bit_optimizer")
    assert [problem.allows(name) for name in names] == [True] * 5
    assert [rounding.allows(name) for name in names] == [False, True, True, True, True]
    assert all(found.plan.activations.compress == "none" for found in search(rounding).frontier)


def test_a_pin_beyond_the_loss_that_is_allowed_is_refused() -> None:
    with pytest.raises(InvalidWorkload) as caught:
        Goal(device_budget_bytes=1, allow_lossy=True, most_loss="rounding", pins=read_pins(["weights.frozen=int8"]))
    assert "goal.most_loss is rounding" in caught.value.message
