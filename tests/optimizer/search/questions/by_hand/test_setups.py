"""Setups that people write by hand: their layouts, and which blocks each recomputes."""

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.search.problem import OuterPlan
from optimizer.search.questions.by_hand.setups import SETUPS, list_labels, recomputing

BY_LABEL = {setup.label: setup for setup in SETUPS}


def test_as_many_blocks_of_every_stage_are_recomputed() -> None:
    assert recomputing((4,), 0) == ("keep",) * 4
    assert recomputing((4,), 3) == ("recompute", "recompute", "keep", "keep")
    assert recomputing((2, 3), 4) == ("recompute", "keep", "recompute", "recompute", "keep")


def test_each_setup_has_the_layout_that_its_name_says() -> None:
    layouts = {label: setup.layout(num_devices=2, num_blocks=8) for label, setup in BY_LABEL.items()}
    assert layouts["ddp"] == DeviceLayout(num_devices=2)
    assert layouts["fsdp"] == DeviceLayout(num_devices=2, data="zero3")
    assert layouts["fsdp_offload"] == layouts["zero_offload"] == layouts["zero2"]
    assert layouts["tensor"] == DeviceLayout(num_devices=2, tensor=2)
    assert layouts["1f1b"] == DeviceLayout(num_devices=2, stage_blocks=(4, 4))
    assert layouts["pooled"] == DeviceLayout(num_devices=2, stage_blocks=(2, 2, 2, 2), schedule="breadth_first")


def test_a_model_with_too_few_blocks_cannot_be_cut() -> None:
    with pytest.raises(InvalidPlan, match="stage_blocks"):
        BY_LABEL["1f1b"].layout(num_devices=4, num_blocks=3)


def test_formats_are_those_that_are_given_but_for_state_that_the_host_updates() -> None:
    formats = OuterPlan(micro_batch_size=8, accumulation_steps=4, dtype="bf16", bits=8, num_chunks=3, gradients="host")
    layout = DeviceLayout(num_devices=2)
    plain, away = (
        BY_LABEL[label].setting(formats, layout, size=2, count=16, num_chunks=1) for label in ("ddp", "fsdp_offload")
    )
    assert (plain.dtype, plain.bits, plain.gradients, plain.state_place, plain.num_chunks) == ("bf16", 8, "keep", "device", 1)
    assert (away.bits, away.gradients, away.state_place, away.weights_place) == (32, "host", "host", "host")


def test_no_two_ways_have_the_same_label() -> None:
    labels = [label for label, _ in list_labels()]
    assert len(set(labels)) == len(labels) == 3 * len(SETUPS)
