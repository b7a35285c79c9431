"""A model that is cut over ranks: the bits of one device, whatever the cut, the order and the number of micro-batches."""

from typing import Any

import pytest
import torch

from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of, read_state, read_weights
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice, assert_equal_on_all

UNEQUAL = (RankShare(device="CPU with 1.00 GiB"), RankShare(device="CPU with 2.00 GiB"))


def cut(**changes: Any) -> RankCase:
    return make_case(**{"model": "untied", "stage_blocks": (1, 2), "accumulation_steps": 4, **changes})


def assert_bits_of_one_device(case: RankCase, carry_out: CarryOut, on_one_device: OnOneDevice) -> list[dict[str, Any]]:
    replies, folder = carry_out(case)
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    expected, expected_folder = on_one_device(case)
    for name in ("losses", "norms", "left_out", "validation_loss"):
        assert answers[0][name] == expected[name], name
    found, wanted = read_weights(folder), read_weights(expected_folder)
    assert found.keys() == wanted.keys()
    assert [name for name, weight in wanted.items() if not torch.equal(found[name], weight)] == []
    state = {name: tensor for rank in range(case.num_ranks) for name, tensor in read_state(folder, rank=rank).items()}
    wanted_state = read_state(expected_folder)
    assert state.keys() == wanted_state.keys()
    assert all(torch.equal(state[name], wanted_state[name]) for name in state)
    return answers


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        cut(has_uneven_labels=True),
        cut(schedule="gpipe"),
        cut(stage_blocks=(2, 1), activations=("recompute", "selective", "keep")),
        cut(weights=WeightsPlan(dtype="bf16"), num_chunks=4),
        cut(weights=WeightsPlan(dtype="fp16"), optimizer="lion"),
        cut(weights=WeightsPlan(autocast="bf16"), state=OptimizerStatePlan(bits=8)),
        cut(weights=WeightsPlan(dtype="bf16", master="none"), optimizer="adafactor"),
        cut(adapter=Adapter(rank=4)),
        cut(adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int4", dtype="bf16"), activations=("recompute",) * 3),
        cut(adapter=Adapter(rank=4), model="tied", weights=WeightsPlan(frozen="int8")),
        cut(model="llama", accumulation_steps=2),
        cut(stage_blocks=(1, 2, 1, 1), activations=("keep", "recompute", "keep", "keep", "selective"), accumulation_steps=6),
        cut(stage_blocks=(1, 1, 1, 1), activations=("keep",) * 4, accumulation_steps=2, has_uneven_labels=True),
        cut(stage_blocks=(1, 1, 1, 1), activations=("keep",) * 4, accumulation_steps=5, schedule="gpipe"),
        cut(shares=UNEQUAL, activations=("recompute", "keep", "selective"), has_uneven_labels=True),
        cut(shares=UNEQUAL, stage_blocks=(2, 1), adapter=Adapter(rank=4), weights=WeightsPlan(frozen="int4", dtype="bf16")),
    ],
    ids=lambda case: case.name,
)
def test_a_model_that_is_cut_ends_with_the_bits_of_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_bits_of_one_device(case, carry_out, on_one_device)
