"""Models that are cut over devices: what may be cut, the order of a stage's work, and refusals in words."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.devices.stages import count_ahead, count_sent_at_once, deal_stages, list_brought, list_turns
from optimizer.plan.explain.diff import describe_change
from optimizer.plan.explain.training import explain_common
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.pins.training import pins_of_change, read_pins
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload
from tests.optimizer.runtime.ranks.cases import RankCase, make_case

AWAY = OptimizerStatePlan(place="disk")


def cut(**changes: Any) -> RankCase:
    return make_case(**{"model": "untied", "stage_blocks": (1, 2), "accumulation_steps": 4, **changes})


class Costs:
    network_bytes = 2**20
    exposed_ms = {"network": 12.5}
    host_peak_bytes = disk_peak_bytes = remote_peak_bytes = 0
    copied_bytes: dict[str, int] = {}
    exposed_copy_ms = 0.0


def check(case: RankCase, *, num_blocks: int = 3, workload: TrainingWorkload | None = None) -> None:
    case.plan.check(num_blocks=num_blocks, workload=workload or case.workload)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"num_devices": 2, "stage_blocks": (3, 0)}, "leaves stage 2 without a block"),
        ({"num_devices": 1, "stage_blocks": (3,)}, "allowed: 2 to 1024 stages"),
        ({"num_devices": 3, "stage_blocks": (1, 2)}, "num_devices is 3; plan.layout.stage_blocks is 1, 2, one device for"),
        (
            {"num_devices": 2, "stage_blocks": (1, 2), "ranks": (RankShare(), RankShare(micro_batch_size=2))},
            r"ranks\[1\].micro_batch_size is 2; plan.layout.stage_blocks is 1, 2, and every micro-batch goes through all",
        ),
        (
            {"num_devices": 2, "stage_blocks": (1, 2), "ranks": (RankShare(accumulation_steps=4), RankShare())},
            r"ranks\[0\].accumulation_steps is 4; .* plan.batch is of all",
        ),
        (
            {"num_devices": 2, "stage_blocks": (1, 1), "ranks": (RankShare(), RankShare(per_block=("keep", "keep")))},
            r"ranks\[1\].per_block is .* each block is on one rank: leave it out, plan.activations.per_block says",
        ),
        ({"num_devices": 2, "stage_blocks": (1, 1, 1)}, "num_devices is 2; .* one device for each, or as many stages for every"),
        ({"num_devices": 2, "stage_blocks": (1, 1, 1, 1)}, "schedule is 1f1b; .*, 4 stages on 2 devices: use breadth_first"),
        ({"num_devices": 2, "stage_blocks": (1, 2), "data": "zero1"}, "plan.layout.data is zero1; .* leave nothing to share out"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_in_words(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        DeviceLayout(**layout)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (cut(accumulation_steps=1), "batch.accumulation.steps is 1, which leaves all stages but one idle"),
        (cut(activations=("keep", "offload_disk", "keep")), "activations.per.block is offload.disk, .* use offload, to the host"),
        (cut(gradients="consume", accumulation_steps=2), "gradients.choice is consume, which needs one micro-batch"),
        (cut(state=AWAY, gradients="host"), "optimizer state place is disk, which is not carried out where the model is cut"),
        (cut(state=AWAY, weights=WeightsPlan(place="remote"), gradients="host"), "weights place is remote, .* use host"),
        (cut(objective="orpo", packing="off", loss_on="assistant"), "which is carried out for next-token training; orpo"),
    ],
    ids=["one-micro-batch", "offload", "gradients", "state", "streamed", "pairs"],
)
def test_what_a_cut_does_not_go_with_is_refused_with_what_to_do(case: RankCase, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        check(case)


def test_stages_that_are_not_the_models_blocks_are_refused() -> None:
    case = cut(activations=("keep",) * 4)
    with pytest.raises(InvalidPlan, match="stage_blocks is 1, 2; 3 blocks in all; this model has 4"):
        check(case, num_blocks=4)


def test_every_stage_takes_the_whole_batch() -> None:
    plan = cut().plan
    assert plan.layout.num_parts == 1
    assert [plan.stretch_of(rank) for rank in (0, 1)] == [range(8), range(8)]
    check(cut())


def test_stages_on_unequal_devices_all_carry_out_one_plan() -> None:
    case = cut(shares=(RankShare(device="a"), RankShare(device="b")), activations=("keep", "recompute", "selective"))
    check(case)
    assert case.plan.of_ranks() == (case.plan, case.plan)
    assert case.plan.rank_sequences == (8,)
    assert case.plan.stretch_of(1) == range(8)
    assert Plan.from_json(case.plan.to_json()) == case.plan
    assert {"cut_model", "recompute"} <= set(case.plan.techniques)


def test_a_cut_uses_its_own_technique_and_shares_no_batch() -> None:
    plan = cut().plan
    assert "cut_model" in plan.techniques
    assert "data_parallel" not in plan.techniques


@pytest.mark.parametrize(("schedule", "num_rounds"), [("1f1b", 1), ("gpipe", 1), ("breadth_first", 1), ("breadth_first", 3)])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_each_stage_does_every_micro_batch_once_in_order(schedule: Any, num_rounds: int, num_micro_batches: int) -> None:
    for own in deal_stages((1, 1, 1) * num_rounds, 3):
        turns = list(list_turns(own, num_micro_batches=num_micro_batches, schedule=schedule))
        assert len(turns) == 2 * num_rounds * num_micro_batches
        for stage, kind in product(own.stages, ("forward", "backward")):
            found = [index for what, index, number in turns if (what, number) == (kind, stage.index)]
            assert found == list(range(num_micro_batches))
        assert all(
            turns.index(("forward", index, stage.index)) < turns.index(("backward", index, stage.index))
            for stage, index in product(own.stages, range(num_micro_batches))
        )


def test_a_device_does_all_micro_batches_of_a_stage_before_its_next_and_goes_back_the_same_way() -> None:
    own = deal_stages((1, 1, 1, 1), 2)[1]
    assert own.blocks == (1, 3)
    turns = [(kind, number) for kind, _, number in list_turns(own, num_micro_batches=2, schedule="breadth_first")]
    last_round = [("forward", 3), ("backward", 3)] * 2
    assert turns == [*[("forward", 1)] * 2, *last_round, *[("backward", 1)] * 2]


def test_stages_are_dealt_out_in_turn_and_shown_by_their_blocks() -> None:
    first, last = deal_stages((2, 1, 1, 2), 2)
    assert (first.blocks, first.is_first, first.is_last) == ((0, 1, 3), True, False)
    assert (last.blocks, last.is_first, last.is_last) == ((2, 4, 5), False, True)
    assert (first.words, last.words) == ("blocks 1 to 2 and 4", "blocks 3 and 5 to 6")
    assert [own.words for own in deal_stages((1, 2), 2)] == ["block 1", "blocks 2 to 3"]


def test_what_comes_round_again_is_held_until_the_first_device_has_done_its_round() -> None:
    ranks = deal_stages((1,) * 6, 3)
    assert [count_sent_at_once(own, num_micro_batches=8) for own in ranks] == [(1, 6), (1, 1), (6, 1)]
    assert {count_sent_at_once(own, num_micro_batches=2) for own in ranks} == {(1, 1)}
    assert {count_sent_at_once(own, num_micro_batches=8) for own in deal_stages((1, 1, 1), 3)} == {(1, 1)}


def test_a_stage_has_its_own_weights_and_some_of_the_next_on_the_device() -> None:
    own = deal_stages((2, 1, 2, 1, 1, 1), 2)[0]
    assert own.blocks == (0, 1, 3, 4, 6)
    first, second, third = own.stages
    assert list_brought(own, first, prefetch=1, is_backward=False) == (0, 1, 3)
    assert list_brought(own, second, prefetch=0, is_backward=False) == (3, 4)
    assert list_brought(own, second, prefetch=3, is_backward=False) == (3, 4, 6, 1, 0)
    for is_backward in (False, True):
        assert list_brought(own, third, prefetch=3, is_backward=is_backward) == (6, 4, 3, 1)
    assert list_brought(own, first, prefetch=3, is_backward=True) == (1, 0)


def test_fewer_micro_batches_are_under_way_toward_the_last_stage() -> None:
    ranks = deal_stages((1, 1, 1, 1), 4)
    assert [1 + count_ahead(own, num_micro_batches=8, schedule="1f1b") for own in ranks] == [4, 3, 2, 1]
    assert [1 + count_ahead(own, num_micro_batches=2, schedule="1f1b") for own in ranks] == [2, 2, 2, 1]
    assert {1 + count_ahead(own, num_micro_batches=8, schedule="gpipe") for own in ranks} == {8}


def test_pins_of_a_cut_are_read_and_kept() -> None:
    pins = read_pins(["layout.stage_blocks=1,2", "layout.schedule=gpipe"])
    assert pins.layout.stage_blocks == (1, 2)
    plan = cut(schedule="gpipe").plan
    assert pins.broken_by(plan) is None
    assert pins.broken_by(replace(plan, layout=replace(plan.layout, stage_blocks=(2, 1)))) == "layout.stage_blocks"
    assert read_pins(["layout.schedule=gpipe"]).broken_by(cut().plan) == "layout.schedule"
    moved = replace(plan, layout=replace(plan.layout, stage_blocks=(2, 1)))
    assert pins_of_change(plan, moved) == {"layout": {"stage_blocks": [2, 1]}}


def test_a_plan_that_is_cut_goes_through_json() -> None:
    plan = cut(schedule="gpipe").plan
    assert Plan.from_json(plan.to_json()) == plan


def test_a_change_of_the_cut_is_named() -> None:
    plan = cut().plan
    moved = replace(plan, layout=replace(plan.layout, stage_blocks=(2, 1)))
    assert describe_change(plan, moved) == "weights, place: cut into 1 + 2 blocks to cut into 2 + 1 blocks"
    assert describe_change(replace(plan, layout=DeviceLayout()), plan) == "weights, place: device to cut into 1 + 2 blocks"


def test_the_explanation_says_which_blocks_lie_where() -> None:
    sentences = explain_common(cut().plan, prediction=Costs())
    assert sentences[0] == "the model is cut over 2 devices: rank 0 has block 1; rank 1 has blocks 2 to 3"
    assert "(1F1B)" in sentences[1]
    assert sentences[2] == "each device sends 1.00 MiB to the others in a step; compute waits 12.5 ms for it"


def test_weights_that_stream_come_to_the_device_that_has_their_block() -> None:
    streamed = cut(weights=WeightsPlan(place="host"), gradients="host", state=OptimizerStatePlan(place="host"))
    words = "each block's weights come from the host as they are needed, one block ahead, to the device that has the block"
    assert any(sentence.startswith(words) for sentence in explain_common(streamed.plan, prediction=Costs()))
