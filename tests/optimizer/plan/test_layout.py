"""Plans for several devices: sizes that are refused, and decisions that cannot go together."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.layout import DeviceLayout
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=16, global_batch_size=8)
PLAN = Plan(
    layout=DeviceLayout(num_devices=2, data="zero1"),
    batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
    activations=ActivationsPlan(per_block=("keep", "keep")),
)
STREAMED: dict[str, Any] = {
    "weights": WeightsPlan(place="host"),
    "gradients": GradientsPlan(choice="host"),
    "optimizer_state": OptimizerStatePlan(place="host"),
}


@pytest.mark.parametrize(
    ("num_devices", "data", "message"),
    [
        (0, "replicated", "plan.layout.num_devices is 0; allowed: 1 to 64"),
        (65, "replicated", "plan.layout.num_devices is 65; allowed: 1 to 64"),
        (1, "zero2", "plan.layout.data is zero2 on one device, which has nobody to share with; allowed: replicated"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(num_devices: int, data: Any, message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        DeviceLayout(num_devices=num_devices, data=data)
    assert str(caught.value) == message


def test_the_batches_of_all_devices_make_the_workloads() -> None:
    PLAN.check(num_blocks=2, workload=WORKLOAD)
    with pytest.raises(InvalidPlan, match="makes 16 sequences per step on 4 devices; workload.global_batch_size is 8"):
        replace(PLAN, layout=DeviceLayout(num_devices=4)).check(num_blocks=2, workload=WORKLOAD)


@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_weights_that_stream_are_updated_by_every_rank(data: Any) -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, data=data), **STREAMED)
    conflict = plan.find_conflict(WORKLOAD)
    assert str(conflict) == (
        f"layout data is {data}, which gives each trained tensor to one rank; weights that stream are updated at home by every "
        "rank: use replicated"
    )
    assert conflict.fields["field"] == "plan.layout.data"
    assert replace(plan, layout=DeviceLayout(num_devices=2)).find_conflict(WORKLOAD) is None


def test_embeddings_with_sparse_gradients_train_on_one_device() -> None:
    conflict = replace(PLAN, layout=DeviceLayout(num_devices=2)).find_conflict(WORKLOAD, has_sparse_gradients=True)
    assert "layout number of devices is 2" in str(conflict)
    assert "train it on one device" in str(conflict)
    assert replace(PLAN, layout=DeviceLayout()).find_conflict(WORKLOAD, has_sparse_gradients=True) is None


def test_a_plan_without_a_layout_is_for_one_device() -> None:
    document = PLAN.to_json()
    del document["layout"]
    assert Plan.from_json(document).layout == DeviceLayout()
