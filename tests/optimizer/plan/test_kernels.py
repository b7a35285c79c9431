"""How blocks run is a decision of the plan: what it goes with, how it is read, and what it costs."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.goal import Goal
from optimizer.plan.activations import ActivationsPlan, KernelsPins, KernelsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import ROUNDING
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter, TrainingWorkload

PLAN = Plan(
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
    activations=ActivationsPlan(per_block=("keep", "recompute")),
    kernels=KernelsPlan(blocks="compiled"),
)
WORKLOAD = TrainingWorkload(sequence_length=16, global_batch_size=2)


def test_compiled_blocks_are_a_technique_that_rounds() -> None:
    assert PLAN.techniques == ("recompute", "compile_blocks")
    assert "compile_blocks" in ROUNDING
    assert not PLAN.is_lossless


def test_a_plan_without_the_decision_runs_op_by_op() -> None:
    document = PLAN.to_json()
    del document["kernels"]
    plan = Plan.from_json(document)
    assert plan.kernels.blocks == "memory_saving"
    assert (plan.representation, PLAN.representation) == ("fp32", "fp32@compiled")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activations": ActivationsPlan(per_block=("keep", "selective"))},
            "keeps some of a block's results: a compiled block is one op, so use recompute, or run blocks op by op",
        ),
        (
            {"weights": WeightsPlan(frozen="nf4")},
            "is nf4, which a library unpacks that the compiler cannot look into: use int8 or int4, or run blocks op by op",
        ),
        (
            {"layout": DeviceLayout(num_devices=2)},
            "is 2, which is not carried out with compiled blocks: use one device, or run blocks op by op",
        ),
    ],
)
def test_what_does_not_go_with_compiled_blocks_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    plan = replace(PLAN, **change)
    workload = WORKLOAD if plan.weights.frozen == "same" else replace(WORKLOAD, adapter=Adapter(rank=4))
    conflict = plan.find_conflict(workload)
    assert isinstance(conflict, InvalidPlan)
    assert str(conflict).endswith(message)
    assert replace(plan, kernels=KernelsPlan()).find_conflict(workload) is None


def test_a_pin_needs_a_goal_that_allows_rounding() -> None:
    pins = read_pins(["kernels.blocks=compiled"])
    assert pins == Pins(kernels=KernelsPins(blocks="compiled"))
    assert Goal(device_budget_bytes=1, allow_lossy=True, most_loss="rounding", pins=pins).pins == pins
    with pytest.raises(InvalidWorkload, match=r"goal.pins.kernels.blocks is compiled, which changes the numbers, and goal"):
        Goal(device_budget_bytes=1, pins=pins)
