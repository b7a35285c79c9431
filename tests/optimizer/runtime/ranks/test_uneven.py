"""Ranks that take unequal parts of a step, and save activations in their own ways, against one device that splits alike."""

from typing import Any

import pytest

from optimizer.plan.devices.layout import RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice, assert_like_one_device

RECOMPUTE = ("recompute",) * 3
SIZES = (RankShare(micro_batch_size=1, per_block=RECOMPUTE), RankShare(micro_batch_size=3))
"""Ranks with equal numbers of micro-batches, of other sizes."""
COUNTS = (RankShare(accumulation_steps=1, micro_batch_size=1), RankShare(accumulation_steps=3, micro_batch_size=1))
"""Other numbers of micro-batches."""
THREE = (
    RankShare(micro_batch_size=1, per_block=("recompute", "offload", "selective")),
    RankShare(micro_batch_size=2, accumulation_steps=2, per_block=("keep", "keep", "recompute")),
    RankShare(micro_batch_size=3),
)
"""Both, on three ranks that do other things with their activations."""


@pytest.mark.breadth
@pytest.mark.parametrize("data", ["replicated", "zero1", "zero2"])
@pytest.mark.parametrize("gradients", ["keep", "host", "consume"])
def test_two_ranks_with_micro_batches_of_other_sizes_end_with_the_bits_of_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, data: str, gradients: str
) -> None:
    case = make_case(data=data, gradients=gradients, shares=SIZES, has_uneven_labels=True)
    assert case.has_two_terms
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize("data", ["replicated", "zero1"])
@pytest.mark.parametrize("shares", [COUNTS, THREE], ids=["two", "three"])
@pytest.mark.parametrize("has_uneven_labels", [False, True])
def test_ranks_with_other_numbers_of_micro_batches_train_as_one_device_does(
    carry_out: CarryOut, on_one_device: OnOneDevice, data: str, shares: tuple[RankShare, ...], *, has_uneven_labels: bool
) -> None:
    assert_like_one_device(
        make_case(data=data, shares=shares, has_uneven_labels=has_uneven_labels), carry_out, on_one_device
    )


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        {"data": "zero2", "accumulation_steps": 2, "state": OptimizerStatePlan(bits=8)},
        {"data": "zero1", "gradients": "host", "weights": WeightsPlan(place="host"), "state": OptimizerStatePlan(place="host")},
        {"weights": WeightsPlan(frozen="int8", dtype="bf16"), "adapter": Adapter(rank=4)},
        {"data": "zero2", "weights": WeightsPlan(dtype="fp16"), "optimizer": "lion"},
    ],
    ids=["8-bit", "streamed", "adapters", "fp16"],
)
def test_unequal_ranks_train_as_one_device_does_with_what_plans_decide_for_all(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: dict[str, Any]
) -> None:
    assert_like_one_device(make_case(shares=SIZES, **case), carry_out, on_one_device)


def test_pairs_of_unequal_ranks_weigh_the_same(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    """Expect means over pairs, not over ranks. Weights differ in the order of sums, and margins with them."""
    shares = (RankShare(micro_batch_size=1, accumulation_steps=1), RankShare(micro_batch_size=1, accumulation_steps=3))
    case = make_case(shares=shares, objective="orpo", packing="off", loss_on="assistant")
    answers = assert_like_one_device(case, carry_out, on_one_device)
    expected, _ = on_one_device(case)
    for found, alone in zip(answers[0]["rewards"], expected["rewards"], strict=True):
        assert found["accuracy"] == alone["accuracy"]
        assert found["margin"] == pytest.approx(alone["margin"], abs=1e-6)
