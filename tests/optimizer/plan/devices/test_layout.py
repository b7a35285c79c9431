"""Plans for several devices: sizes that are refused, and decisions that cannot go together."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import is_idle
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter, TrainingWorkload

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
@pytest.mark.parametrize("place", ["disk", "remote"])
def test_trained_weights_off_the_host_are_updated_by_every_rank(data: Any, place: Any) -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, data=data), **{**STREAMED, "weights": WeightsPlan(place=place)})
    conflict = plan.find_conflict(WORKLOAD)
    assert str(conflict) == (
        f"layout data is {data}, which has one rank update each tensor; off the host each rank has streamed weights of its own: "
        "use host or replicated"
    )
    assert conflict.fields["field"] == "plan.layout.data"
    assert replace(plan, layout=DeviceLayout(num_devices=2)).find_conflict(WORKLOAD) is None
    assert replace(plan, **STREAMED).find_conflict(WORKLOAD) is None
    frozen = replace(WORKLOAD, adapter=Adapter(rank=4))
    assert replace(plan, optimizer_state=OptimizerStatePlan()).find_conflict(frozen) is None


@pytest.mark.parametrize(
    ("num_devices", "data", "place", "trains_all", "shares"),
    [
        (2, "zero1", "host", True, True),
        (2, "zero2", "host", False, True),
        (2, "replicated", "host", False, True),
        (2, "replicated", "host", True, False),
        (2, "replicated", "disk", False, False),
        (2, "zero1", "device", True, False),
        (1, "replicated", "host", False, False),
    ],
)
def test_ranks_share_homes_on_the_host_unless_each_updates_its_own(
    num_devices: int, data: Any, place: Any, trains_all: bool, shares: bool
) -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=num_devices, data=data), weights=WeightsPlan(place=place))
    assert plan.shares_homes(trains_all=trains_all) is shares


@pytest.mark.parametrize("place", ["host", "disk", "remote"])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)])
def test_weights_that_are_dealt_out_to_devices_are_nowhere_else(place: Any, adapter: Adapter | None) -> None:
    layout = DeviceLayout(num_devices=2, data="zero3")
    plan = replace(PLAN, layout=layout, **{**STREAMED, "weights": WeightsPlan(place=place)})
    workload = replace(WORKLOAD, adapter=adapter)
    conflict = plan.find_conflict(workload)
    assert conflict is not None
    assert conflict.fields["field"] == "plan.layout.data"
    if place == "host":
        assert str(conflict) == (
            "layout data is zero3, which has each weight on one device; those on the host are there already: use device, or zero2"
        )
    assert replace(plan, weights=WeightsPlan(prefetch=2)).find_conflict(workload) is None


def test_blocks_weights_come_from_elsewhere_or_from_other_devices() -> None:
    assert not PLAN.brings_weights
    assert replace(PLAN, weights=WeightsPlan(place="host")).brings_weights
    assert replace(PLAN, layout=DeviceLayout(num_devices=2, data="zero3")).brings_weights


def test_how_many_blocks_come_ahead_matters_where_any_do() -> None:
    assert is_idle("weights.prefetch", PLAN)
    assert not is_idle("weights.prefetch", replace(PLAN, layout=DeviceLayout(num_devices=2, data="zero3")))
    assert not is_idle("weights.prefetch", replace(PLAN, weights=WeightsPlan(place="host")))
    assert is_idle("weights.prefetch", GenerationPlan())


def test_embeddings_with_sparse_gradients_train_on_one_device() -> None:
    conflict = replace(PLAN, layout=DeviceLayout(num_devices=2)).find_conflict(WORKLOAD, has_sparse_gradients=True)
    assert "layout number of devices is 2" in str(conflict)
    assert "train it on one device" in str(conflict)
    assert replace(PLAN, layout=DeviceLayout()).find_conflict(WORKLOAD, has_sparse_gradients=True) is None


def test_a_plan_without_a_layout_is_for_one_device() -> None:
    document = PLAN.to_json()
    del document["layout"]
    assert Plan.from_json(document).layout == DeviceLayout()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"sync_every": 0}, "plan.layout.sync_every is 0; allowed: 1 to 10000"),
        ({"sync_every": 8, "num_devices": 1}, "plan.layout.num_devices is 1; plan.layout.sync_every is 8, steps between"),
        ({"sync_every": 8, "data": "zero1"}, "plan.layout.data is zero1; plan.layout.sync_every is 8, steps with all"),
        ({"sync_every": 8, "stage_blocks": (1, 1)}, "plan.layout.stage_blocks is 1, 1; plan.layout.sync_every is 8"),
        (
            {"sync_every": 8, "num_devices": 9, "sync_format": "int8"},
            "plan.layout.sync_format is int8; plan.layout.sync_every is 8, steps of 9 devices; at most 8 add up in 8 bits",
        ),
    ],
)
def test_steps_alone_that_cannot_be_are_refused_by_name(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        DeviceLayout(**{"num_devices": 2, **layout})
    assert str(caught.value).startswith(message)


def test_steps_alone_go_through_json_and_older_plans_share_every_step() -> None:
    local = replace(PLAN, layout=DeviceLayout(num_devices=2, sync_every=32, sync_format="int8"))
    document = local.to_json()
    assert Plan.from_json(document) == local
    assert "local_steps" in local.techniques
    assert not local.is_lossless
    for name in ("sync_every", "sync_format"):
        del document["layout"][name]
    assert Plan.from_json(document).layout == DeviceLayout(num_devices=2)
    assert is_idle("layout.sync_format", PLAN)
    assert not is_idle("layout.sync_format", local)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 0}, "plan.layout.tensor is 0; plan.layout.num_devices is 2: use all, or 1"),
        ({"tensor": 2, "num_devices": 4}, "plan.layout.tensor is 2; plan.layout.num_devices is 4: use all, or 1"),
        ({"tensor": 2, "data": "zero1"}, "plan.layout.data is zero1; each block is shared, and its state with it"),
        ({"tensor": 2, "stage_blocks": (1, 1)}, "plan.layout.stage_blocks is 1, 1; all devices run every block: leave it out"),
        ({"tensor": 2, "sync_every": 8}, "plan.layout.sync_every is 8; devices that share each block share every step: use 1"),
        ({"tensor": 2, "ranks": (RankShare(), RankShare())}, "plan.layout.ranks is 2; devices that share each block are alike"),
    ],
)
def test_shared_blocks_that_cannot_be_are_refused_by_name(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        DeviceLayout(**{"num_devices": 2, **layout})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "workload", "message"),
    [
        ({}, {"optimizer": "adafactor"}, "layout tensor is 2, which gives each device parts of matrices; Adafactor sums"),
        ({}, {"objective": "dpo", "adapter": Adapter(), "packing": "off", "loss_on": "assistant"}, "layout tensor is 2"),
        ({}, {"adapter": Adapter(dropout=0.1)}, "layout tensor is 2, which needs the same random numbers on all devices"),
        ({"optimizer_state": OptimizerStatePlan(bits=8)}, {}, "optimizer state bits is 8, which has a scale"),
        ({"weights": WeightsPlan(frozen="int8")}, {"adapter": Adapter()}, "weights frozen is int8, which has scales that a part"),
    ],
)
def test_what_shared_blocks_do_not_go_with_is_refused(changes: dict[str, Any], workload: dict[str, Any], message: str) -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, tensor=2), **changes)
    conflict = plan.find_conflict(replace(WORKLOAD, **workload))
    assert conflict is not None
    assert str(conflict).startswith(message)


def test_ranks_that_share_blocks_see_the_whole_batch_and_have_homes_of_their_own() -> None:
    plan = replace(PLAN, layout=DeviceLayout(num_devices=2, tensor=2), **STREAMED)
    assert Plan.from_json(plan.to_json()) == plan
    assert [plan.stretch_of(rank) for rank in (0, 1)] == [range(4)] * 2
    assert "share_blocks" in plan.techniques
    assert "data_parallel" not in plan.techniques
    assert plan.is_lossless
    assert not plan.shares_homes(trains_all=True)
    assert not plan.shares_homes(trains_all=False)
