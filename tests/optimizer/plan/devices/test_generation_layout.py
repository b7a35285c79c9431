"""The devices of a generation: what a layout may be, and what its plan refuses."""

from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.devices.generation_layout import GenerationLayout, count_devices
from optimizer.plan.devices.layout import check_depth
from optimizer.plan.devices.stages import list_stages
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload, deal_sequences

CUT = GenerationLayout(stage_blocks=(5, 7))
WORKLOAD = GenerationWorkload(prompt_length=8, num_new_tokens=4, num_sequences=6)
STAYS = "which a model that is cut over devices cannot have: weights, and unpacked keys and values, stay on each device"


def test_stages_are_neighbouring_blocks_in_the_order_of_the_model() -> None:
    assert [(stage.first_block, stage.num_blocks) for stage in list_stages(CUT.stage_blocks)] == [(0, 5), (5, 7)]
    first, last = list_stages(CUT.stage_blocks)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    assert list_stages(GenerationLayout(num_replicas=2).stage_blocks) == ()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"num_replicas": 0}, "plan.layout.num_replicas is 0; allowed: 1 to 64"),
        ({"stage_blocks": (12,)}, "plan.layout.stage_blocks is 12; allowed: 2 to 64 stages, or none"),
        (
            {"stage_blocks": (4, 0, 8)},
            "plan.layout.stage_blocks is 4, 0, 8; which leaves stage 2 without a block; each stage needs one at least",
        ),
        (
            {"stage_blocks": (6, 6), "num_replicas": 2},
            "plan.layout.num_replicas is 2; stage_blocks cut the model as well, and copies of a cut model are not supported",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_words(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan) as refused:
        GenerationLayout(**layout)
    assert refused.value.message == message


def test_stages_must_be_all_blocks_of_the_model() -> None:
    check_depth(CUT.stage_blocks, 12)
    with pytest.raises(InvalidPlan, match="plan.layout.stage_blocks is 5, 7; 12 blocks in all; this model has 24"):
        check_depth(CUT.stage_blocks, 24)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            GenerationPlan(layout=CUT, weights=WeightsPlan(place="host")),
            f"weights place is host, {STAYS}",
        ),
        (
            GenerationPlan(layout=CUT, kv_cache=KvCachePlan(dtype="int8")),
            f"KV cache is int8 on device, {STAYS}",
        ),
        (
            GenerationPlan(layout=GenerationLayout(num_replicas=7)),
            "layout number of replicas is 7, which leaves copies without a prompt (the workload has 6)",
        ),
        (
            GenerationPlan(batch_size=4, layout=GenerationLayout(num_replicas=2)),
            "batch size is 4, which is more than the sequences to generate (the workload has 3)",
        ),
    ],
)
def test_a_plan_that_several_devices_cannot_carry_out_is_refused_in_words(plan: GenerationPlan, message: str) -> None:
    conflict = plan.find_conflict(WORKLOAD)
    assert conflict is not None
    assert conflict.message == message


def test_a_plan_from_before_layouts_is_of_one_device() -> None:
    document = GenerationPlan().to_json()
    del document["layout"]
    assert GenerationPlan.from_json(document) == GenerationPlan()
    assert GenerationPlan.from_json(GenerationPlan(layout=CUT).to_json()).layout == CUT


def test_devices_of_a_stored_plan_are_counted_whatever_its_kind() -> None:
    assert count_devices(None) == count_devices({"batch": {}}) == 1
    assert count_devices({"layout": {"num_devices": 2, "data": "zero1"}}) == 2
    assert count_devices(GenerationPlan(layout=GenerationLayout(num_replicas=3)).to_json()) == 3
    assert count_devices(GenerationPlan(layout=CUT).to_json()) == 2


def test_sequences_are_dealt_out_the_longest_first() -> None:
    lengths = [(5, 1), (9, 9), (5, 1), (20, 4), (9, 9)]
    assert deal_sequences(lengths, num_replicas=2) == [[3, 4, 2], [1, 0]]
    workload = GenerationWorkload.of_prompts([5, 9, 5, 20, 9], num_new_tokens=[1, 9, 1, 4, 9])
    assert workload.of_replica(1, num_replicas=2).lengths == ((9, 9), (5, 1))
    assert WORKLOAD.of_replica(1, num_replicas=4).num_sequences == 2
    assert WORKLOAD.of_replica(3, num_replicas=4).num_sequences == 1
