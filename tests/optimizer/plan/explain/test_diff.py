"""Only what differs is listed."""

from dataclasses import replace

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.explain.diff import Difference, diff_plans
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan

PLAN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=4),
    activations=ActivationsPlan(per_block=("recompute",) * 8 + ("keep",) * 4),
)


def test_equal_plans_do_not_differ() -> None:
    assert diff_plans(PLAN, Plan.from_json(PLAN.to_json())) == []


def test_single_decisions_are_named_by_their_path() -> None:
    other = replace(PLAN, weights=WeightsPlan(dtype="bf16"), batch=BatchPlan(micro_batch_size=4, accumulation_steps=2))
    assert diff_plans(PLAN, other) == [
        Difference(path="batch.micro_batch_size", a=2, b=4),
        Difference(path="batch.accumulation_steps", a=4, b=2),
        Difference(path="weights.dtype", a="fp32", b="bf16"),
    ]


def test_neighbouring_blocks_are_one_difference() -> None:
    other = replace(PLAN, activations=ActivationsPlan(per_block=("offload",) * 3 + ("recompute",) * 4 + ("keep",) * 5))
    assert diff_plans(PLAN, other) == [
        Difference(path="activations.per_block[0:3]", a="recompute", b="offload"),
        Difference(path="activations.per_block[7]", a="recompute", b="keep"),
    ]


def test_plans_of_different_depth_differ_in_all_blocks() -> None:
    other = replace(PLAN, activations=ActivationsPlan(per_block=("keep",)))
    (difference,) = diff_plans(PLAN, other)
    assert difference.path == "activations.per_block"
    assert difference.b == ["keep"]
