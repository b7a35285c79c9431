"""Goals of runs that go on from a checkpoint: its form stays, its loss is allowed, and no other that the goal refuses."""

from typing import Any

import pytest

from optimizer.api.keep_form import keep_form
from optimizer.goal import Goal
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import LOSSY
from optimizer.plan.weights import WeightsPlan

BF16 = WeightsPlan(dtype="bf16")


def make_plan(**parts: Any) -> Plan:
    batch = BatchPlan(micro_batch_size=1, accumulation_steps=1)
    return Plan(batch=batch, activations=ActivationsPlan(per_block=("keep",)), **parts)


def lossy_of(goal: Goal) -> set[str]:
    return {technique for technique in LOSSY if goal.may_use(technique)}


@pytest.mark.parametrize("goal", [{}, {"allow_lossy": True, "most_loss": "rounding"}, {"allow_lossy": True}])
@pytest.mark.parametrize(
    ("parts", "has_adapter", "taken"),
    [
        ({}, False, set()),
        ({"weights": BF16}, False, {"bf16"}),
        ({"weights": WeightsPlan(dtype="bf16", master="none")}, False, {"bf16", "no_master_weights"}),
        ({"weights": BF16, "optimizer_state": OptimizerStatePlan(bits=8)}, False, {"bf16", "8bit_optimizer"}),
        ({"weights": WeightsPlan(dtype="bf16", frozen="int8")}, True, {"bf16", "quantize_frozen"}),
    ],
)
def test_only_the_loss_of_the_checkpoints_form_is_added_to_what_the_goal_allows(
    goal: dict[str, Any], parts: dict[str, Any], has_adapter: bool, taken: set[str]
) -> None:
    asked = Goal(device_budget_bytes=1, **goal)
    assert lossy_of(keep_form(asked, make_plan(**parts), has_adapter=has_adapter)) == lossy_of(asked) | taken


def test_what_was_forbidden_stays_so_and_a_second_time_changes_nothing() -> None:
    goal = keep_form(Goal(device_budget_bytes=1, forbid=("compress", "disk")), make_plan(weights=BF16), has_adapter=False)
    assert goal.forbid[:2] == ("compress", "disk")
    assert len(set(goal.forbid)) == len(goal.forbid)
    assert keep_form(goal, make_plan(weights=BF16), has_adapter=False) == goal
