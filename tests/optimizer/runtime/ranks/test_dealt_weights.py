"""Weights that are on one rank's device alone: the numbers of one device, and a part of the bytes on each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimizer.formats.ownership import deal_frozen
from optimizer.models.anatomy import find_blocks
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.ranks.dealt_weights import DealtWeights
from optimizer.runtime.step.weights import list_streamed
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice, assert_equal_on_all, assert_like_one_device


def dealt(**changes: Any) -> RankCase:
    return make_case(**{"data": "zero3", **changes})


def under_adapters(frozen: str = "same", **changes: Any) -> RankCase:
    return dealt(weights=WeightsPlan(frozen=frozen, **changes.pop("weights", {})), adapter=Adapter(rank=4), **changes)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        dealt(has_uneven_labels=True),
        dealt(gradients="host", state=OptimizerStatePlan(place="host")),
        dealt(gradients="consume", weights=WeightsPlan(prefetch=2)),
        dealt(weights=WeightsPlan(dtype="bf16", prefetch=0), activations=("offload", "recompute", "selective")),
        dealt(weights=WeightsPlan(dtype="bf16", master="none"), optimizer="adafactor"),
        dealt(weights=WeightsPlan(dtype="fp16"), optimizer="lion", num_chunks=4),
        dealt(state=OptimizerStatePlan(bits=8), model="tied"),
        dealt(num_ranks=4, accumulation_steps=2),
        dealt(model="shared", activations=("keep",) * 4),
        dealt(num_ranks=4, activations=("keep",), trains="norm.weight"),
    ],
    ids=["plain", "state-on-host", "consumed", "bf16", "no-masters", "fp16", "8-bit", "four", "shared-blocks", "few-trained"],
)
def test_trained_weights_that_are_dealt_out_end_as_on_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        under_adapters(),
        under_adapters("int4", activations=("recompute", "selective", "offload")),
        under_adapters("int8", gradients="host", state=OptimizerStatePlan(place="host")),
        under_adapters("int4", gradients="consume", num_ranks=4, weights={"dtype": "bf16", "prefetch": 2}),
        under_adapters("int4", objective="dpo", packing="off", loss_on="assistant"),
    ],
    ids=["plain", "int4", "int8-host", "consumed-four", "dpo"],
)
def test_frozen_weights_that_are_dealt_out_train_adapters_as_on_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_gets_and_sends_the_weights_of_the_same_step(
    carry_out: CarryOut, on_one_device: OnOneDevice, late: int
) -> None:
    case = dealt(trains="proj.weight")
    replies, _ = carry_out(case, lags=[late, "fetch"])
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    expected, _ = on_one_device(case)
    assert answers[0]["validation_loss"] == expected["validation_loss"]
    assert answers[0]["weights_sha256"] == expected["weights_sha256"]


def test_an_overflow_leaves_what_each_keeps_as_it_was(carry_out: CarryOut) -> None:
    replies, _ = carry_out(dealt(weights=WeightsPlan(dtype="fp16")), spoils=[1, 1])
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    assert answers[0]["left_out"][1]


@pytest.mark.parametrize("activations", [("keep",) * 3, ("recompute",) * 3])
def test_blocks_weights_cross_twice_in_each_micro_batch_and_not_after_the_update(
    carry_out: CarryOut, activations: tuple[str, ...]
) -> None:
    """Recomputed or not. In an evaluation they cross once more, of one micro-batch for each step's."""
    case = dealt(accumulation_steps=2, activations=activations)
    replies, _ = carry_out(case)
    named = {name: p.numel() for name, p in case.make_model().named_parameters()}
    in_blocks = sum(size for name, size in named.items() if "layers." in name)
    outside = sum(named.values()) - in_blocks
    steps, micro_batches = 3, 2
    gradients = steps * micro_batches * (in_blocks + outside)
    weights = steps * (2 * micro_batches * in_blocks + outside) + micro_batches * in_blocks
    assert [answer["collective_bytes"] for answer in answers_of(replies)] == [4 * (gradients + weights)] * 2


def test_frozen_weights_are_dealt_out_block_by_block_as_evenly_as_they_can_be() -> None:
    block = [40, 40, 10, 90, 90, 90, 1, 1]
    dealt_out = deal_frozen([block] * 7, num_ranks=3)
    held = [0, 0, 0]
    for owners in dealt_out:
        for size, owner in zip(block, owners, strict=True):
            held[owner] += size
        assert max(held) - min(held) <= max(block)
    assert deal_frozen([[], [5]], num_ranks=2) == [[], [0]]


def test_a_packed_matrix_is_with_its_scales() -> None:
    case = under_adapters("int4")
    model = case.make_model()
    ranks: Any = SimpleNamespace(rank=0, num_ranks=2)
    listed = list_streamed(model, find_blocks(model), trains_all=False)
    homes = DealtWeights(ranks, layout=case.plan.layout, tiers=Tiers(device=torch.device("cpu"))).deal(model, listed)
    here = {name: home.is_here for block in homes for name, home in block.items()}
    packed = [name for name in here if name.endswith("_packed")]
    assert len(packed) == 3 * 5
    assert all(here[name] == here[name.replace("_packed", "_scales")] for name in packed)
    assert {here[name] for name in packed} == {True, False}
