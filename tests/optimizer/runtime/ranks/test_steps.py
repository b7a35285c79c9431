"""Steps of several ranks against the same micro-batches on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, draw_cases, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of, read_state, read_weights
from tests.optimizer.runtime.ranks.rank_process import LEARNING_RATE

OnOneDevice = Callable[[RankCase], tuple[dict[str, Any], Path]]
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 4e-3}
"""For weights. Below fp32 another order of sums moves a gradient by a part in 256 or 2048, and with it the sign of a small one.
In bf16 a weight of 1 is also rounded to a part in 256."""
TOLERANCE_8_BITS = 1e-4
"""A moment at the border of two of its 256 values goes to one here and to the other there."""
LION_TOLERANCE = 12 * LEARNING_RATE
"""Lion goes by signs alone, so that a number near zero may move a weight up here and down there, in each of three steps."""
LOSS_TOLERANCES = {"fp32": 1e-5, "bf16": 0.1, "fp16": 1e-2}
"""One device adds up the micro-batches' losses in their dtype, where bf16 has three digits."""


def assert_equal_on_all(answers: list[dict[str, Any]]) -> None:
    for name in ("losses", "norms", "rewards", "left_out", "validation_loss", "weights_sha256"):
        assert all(answer[name] == answers[0][name] for answer in answers), name


def assert_like_one_device(case: RankCase, carry_out: CarryOut, on_one_device: OnOneDevice) -> list[dict[str, Any]]:
    replies, folder = carry_out(case)
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    expected, expected_folder = on_one_device(case)
    dtype = case.plan.weights.dtype
    tolerance = max(
        TOLERANCES[dtype],
        LION_TOLERANCE if case.workload.optimizer == "lion" else 0,
        TOLERANCE_8_BITS if case.plan.optimizer_state.bits == 8 else 0,
    )
    found_weights, expected_weights = read_weights(folder), read_weights(expected_folder)
    assert found_weights.keys() == expected_weights.keys()
    if case.has_two_terms:
        assert answers[0]["weights_sha256"] == expected["weights_sha256"]
        assert answers[0]["norms"] == expected["norms"]
    for name, weight in expected_weights.items():
        torch.testing.assert_close(found_weights[name], weight, rtol=0, atol=tolerance)
    assert answers[0]["losses"] == pytest.approx(expected["losses"], abs=LOSS_TOLERANCES[dtype])
    assert answers[0]["validation_loss"] == pytest.approx(expected["validation_loss"], abs=LOSS_TOLERANCES[dtype])
    assert answers[0]["left_out"] == expected["left_out"]
    state = {name: tensor for rank in range(case.num_ranks) for name, tensor in read_state(folder, rank=rank).items()}
    expected_state = read_state(expected_folder)
    assert state.keys() == expected_state.keys()
    if case.has_two_terms:
        assert all(torch.equal(state[name], expected_state[name]) for name in state)
    return answers


@pytest.mark.breadth
@pytest.mark.parametrize("data", ["replicated", "zero1", "zero2"])
@pytest.mark.parametrize("gradients", ["keep", "host", "consume"])
def test_two_ranks_end_with_the_bits_of_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, data: str, gradients: str
) -> None:
    case = make_case(data=data, gradients=gradients, has_uneven_labels=True)
    assert case.has_two_terms
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("data", "gradients", "num_ranks"),
    [("replicated", "keep", 4), ("zero1", "host", 4), ("zero1", "keep", 2), ("zero2", "keep", 4)],
)
def test_ranks_that_accumulate_differ_from_one_device_in_the_order_of_sums_alone(
    carry_out: CarryOut, on_one_device: OnOneDevice, data: str, gradients: str, num_ranks: int
) -> None:
    case = make_case(data=data, gradients=gradients, num_ranks=num_ranks, accumulation_steps=2, has_uneven_labels=True)
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize("case", draw_cases(12, has_adapters=False), ids=lambda case: case.name)
def test_drawn_combinations_of_decisions_train_as_one_device_does(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_like_one_device(case, carry_out, on_one_device)


def test_adapters_on_packed_weights_train_as_on_one_device(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    case = make_case(
        data="zero2",
        gradients="consume",
        activations=("recompute", "selective", "offload"),
        weights=WeightsPlan(frozen="int4"),
        adapter=Adapter(rank=4),
    )
    assert_like_one_device(case, carry_out, on_one_device)


def test_pairs_have_one_mean_of_rewards(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    case = make_case(data="zero1", objective="orpo", packing="off", loss_on="assistant")
    answers = assert_like_one_device(case, carry_out, on_one_device)
    expected, _ = on_one_device(case)
    assert answers[0]["rewards"] == expected["rewards"]
    assert all(rewards["accuracy"] > 0 for rewards in expected["rewards"])


def test_packed_samples_and_state_in_8_bits_train_as_on_one_device(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    case = make_case(model="llama", data="zero1", packing="best_fit", state=OptimizerStatePlan(bits=8))
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.parametrize("gradients", ["keep", "host", "consume"])
def test_more_ranks_than_tensors_leave_some_without_state(
    carry_out: CarryOut, on_one_device: OnOneDevice, gradients: str
) -> None:
    case = make_case(data="zero1", num_ranks=4, activations=("keep",), trains="norm.weight", gradients=gradients)
    answers = assert_like_one_device(case, carry_out, on_one_device)
    assert [bool(answer["state_names"]) for answer in answers] == [True, True, True, False]


@pytest.mark.parametrize("gradients", ["keep", "host", "consume"])
def test_a_gradient_that_is_infinite_on_one_rank_ends_all_with_the_same_error(carry_out: CarryOut, gradients: str) -> None:
    replies, _ = carry_out(make_case(data="zero2", gradients=gradients), spoils=[1, 1])
    assert [reply["error"]["code"] for reply in replies] == ["loss_not_finite"] * 2


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(carry_out: CarryOut) -> None:
    replies, _ = carry_out(make_case(data="zero1", weights=WeightsPlan(dtype="fp16")), spoils=[1, 1])
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    assert answers[0]["left_out"][1]


def test_ranks_whose_gradients_differ_from_the_start_are_refused_by_name(carry_out: CarryOut) -> None:
    replies, _ = carry_out(make_case(), detaches=[1, 0])
    assert [reply["error"]["code"] for reply in replies] == ["ranks_differ"] * 2
    assert "rank 0: model.norm.weight" in replies[0]["error"]["message"]


def test_a_rank_whose_gradients_change_later_says_so_and_the_others_lose_it(carry_out: CarryOut) -> None:
    replies, _ = carry_out(make_case(data="zero2"), detaches=[1, 1])
    assert replies[1]["error"]["code"] == "ranks_differ"
    assert replies[0]["error"]["code"] == "rank_lost"
