"""Steps of ranks that share each block, against the same micro-batches on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.formats.shared_blocks import Widths, find_slice
from optimizer.models.spec import read_model_spec
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.ranks.tensor.slices import join_slices
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import MODELS, RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of, read_state, read_weights
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice

TOLERANCE = 2e-6
"""For weights, each at most some learning rates from where it began."""
LOSS_TOLERANCE = 1e-6
"""Relative: sums of products are in another order."""
ROUNDED_TOLERANCE = 5e-3
"""The same where sums are rounded to 16 bits."""


def read_whole(case: RankCase, folder: Path, read: Any) -> dict[str, torch.Tensor]:
    """Tensors of all ranks by name, slices joined."""
    by_rank = [read(folder, rank=rank) for rank in range(case.num_ranks)]
    widths = Widths.of(read_model_spec(MODELS[case.model]).config)
    found = {}
    for name, first in by_rank[0].items():
        slice_ = find_slice(name.partition("//")[0], widths)
        held = [tensors[name] for tensors in by_rank]
        if slice_ is None:
            assert all(torch.equal(first, each) for each in held), name
        found[name] = first if slice_ is None else join_slices(held, slice_)
    return found


def assert_like_one_device(
    case: RankCase, carry_out: CarryOut, on_one_device: OnOneDevice, *, tolerance: float = TOLERANCE
) -> list[dict[str, Any]]:
    replies, folder = carry_out(case)
    answers = answers_of(replies)
    for name in ("losses", "norms", "left_out", "validation_loss"):
        assert all(answer[name] == answers[0][name] for answer in answers), name
    expected, expected_folder = on_one_device(case)
    assert answers[0]["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
    assert answers[0]["validation_loss"] == pytest.approx(expected["validation_loss"], rel=LOSS_TOLERANCE)
    assert answers[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for read in (read_weights, read_state):
        found, wanted = read_whole(case, folder, read), read(expected_folder)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=tolerance)
    return answers


@pytest.mark.parametrize("model", ["decoder", "llama"])
def test_two_ranks_that_share_blocks_train_as_one_device_does(
    carry_out: CarryOut, on_one_device: OnOneDevice, model: str
) -> None:
    assert_like_one_device(make_case(model=model, shares_blocks=True), carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "starcoder2", "mistral"])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)], ids=["whole", "adapters"])
def test_parts_of_other_architectures_train_as_one_device_does(
    carry_out: CarryOut, on_one_device: OnOneDevice, model: str, adapter: Adapter | None
) -> None:
    case = make_case(model=model, shares_blocks=True, adapter=adapter, activations=("recompute", "keep", "selective"))
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        {"activations": ("recompute", "selective", "offload"), "accumulation_steps": 2, "has_uneven_labels": True},
        {"gradients": "host", "weights": WeightsPlan(place="host"), "state": OptimizerStatePlan(place="host")},
        {"gradients": "consume", "num_chunks": 4},
        {"adapter": Adapter(rank=4), "gradients": "host", "accumulation_steps": 2},
        {"adapter": Adapter(rank=4), "weights": WeightsPlan(place="host"), "activations": ("recompute",) * 3},
        {"optimizer": "sgd", "accumulation_steps": 3, "model": "shared", "activations": ("keep",) * 4},
    ],
    ids=["activations", "streamed", "consumed", "adapters", "streamed-adapters", "shared"],
)
def test_parts_train_as_one_device_does_with_what_plans_decide(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: dict[str, Any]
) -> None:
    assert_like_one_device(make_case(shares_blocks=True, **case), carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        {"weights": WeightsPlan(dtype="bf16"), "activations": ("recompute", "selective", "keep")},
        {"weights": WeightsPlan(dtype="fp16"), "accumulation_steps": 2},
        {"weights": WeightsPlan(autocast="bf16"), "adapter": Adapter(rank=4)},
        {"weights": WeightsPlan(place="disk"), "gradients": "host", "state": OptimizerStatePlan(place="disk")},
        {"weights": WeightsPlan(dtype="bf16", master="none"), "gradients": "consume"},
        {"packing": "best_fit", "model": "llama"},
    ],
    ids=["bf16", "fp16", "autocast", "disk", "no-masters", "packed"],
)
def test_parts_in_other_numbers_and_places_keep_to_the_losses_of_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: dict[str, Any]
) -> None:
    asked = make_case(shares_blocks=True, **case)
    replies, folder = carry_out(asked)
    answers = answers_of(replies)
    assert answers[0]["losses"] == answers[1]["losses"]
    expected, _ = on_one_device(asked)
    weights = asked.plan.weights
    tolerance = LOSS_TOLERANCE if weights.dtype == "fp32" and weights.autocast == "off" else ROUNDED_TOLERANCE
    assert answers[0]["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert answers[0]["left_out"] == expected["left_out"]
    # What all ranks have is the same on all of them.
    assert read_whole(asked, folder, read_weights).keys() == read_weights(folder).keys()
