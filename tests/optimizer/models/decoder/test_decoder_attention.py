"""Each kind of attention is what its quadratic form says, at lengths that are whole blocks and at others."""

import math

import pytest
import torch
import torch.nn.functional as F

from optimizer.models.decoder.attention import (
    Pattern,
    blocked_attention,
    full_attention,
    linear_attention,
    make_mask,
)

BLOCK = 8
LENGTHS = (5, 8, 13, 16, 40)
"""Shorter than a block, whole blocks, and in between."""
ROUNDING = 1e-12
"""Tolerance for the rounding of fp64."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_inputs(length: int, *, num_groups: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)

    def draw(num_heads: int) -> torch.Tensor:
        return torch.randn((2, num_heads, length, 6), generator=generator, dtype=torch.float64)

    return draw(4), draw(num_groups), draw(num_groups)


def repeat(tensor: torch.Tensor, heads: int = 4) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def masked_dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = query @ repeat(key).transpose(2, 3) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ repeat(value)).transpose(1, 2).flatten(2)


def places(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)


def run_blocked(inputs: tuple[torch.Tensor, ...], pattern: Pattern) -> torch.Tensor:
    mask = make_mask(pattern, inputs[0].shape[2], dtype=torch.float64, device=torch.device("cpu"))
    return blocked_attention(*inputs, pattern=pattern, mask=mask)


@pytest.mark.parametrize("length", LENGTHS)
def test_full_attention_is_masked_dense(length: int) -> None:
    inputs = make_inputs(length)
    query, key = places(length)
    assert (full_attention(*inputs) - masked_dense(*inputs, key <= query)).abs().max() < ROUNDING


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("length", LENGTHS)
def test_local_attention_is_masked_dense(length: int, window: int, num_groups: int) -> None:
    inputs = make_inputs(length, num_groups=num_groups)
    pattern = Pattern(block=BLOCK, num_local=1 + math.ceil((window - 1) / BLOCK), window=window)
    query, key = places(length)
    expected = masked_dense(*inputs, (key <= query) & (query - key < window))
    assert (run_blocked(inputs, pattern) - expected).abs().max() < ROUNDING


@pytest.mark.parametrize(("num_local", "num_global"), [(1, 0), (2, 1), (1, 2), (3, 0), (1, 6)])
@pytest.mark.parametrize("length", LENGTHS)
def test_block_sparse_attention_is_masked_dense(length: int, num_local: int, num_global: int) -> None:
    inputs = make_inputs(length)
    query, key = places(length)
    is_near = query // BLOCK - key // BLOCK < num_local
    expected = masked_dense(*inputs, (key <= query) & (is_near | (key // BLOCK < num_global)))
    actual = run_blocked(inputs, Pattern(block=BLOCK, num_local=num_local, num_global=num_global))
    assert (actual - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_linear_attention_is_its_quadratic_form(length: int, num_groups: int, feature_map: str) -> None:
    query, key, value = make_inputs(length, num_groups=num_groups)
    mapped = F.relu if feature_map == "relu" else lambda tensor: F.elu(tensor) + 1
    scores = (mapped(query) @ repeat(mapped(key)).transpose(2, 3)).tril()
    expected = (scores @ repeat(value) / (scores.sum(-1, keepdim=True) + 1e-6)).transpose(1, 2).flatten(2)
    actual = linear_attention(query, key, value, block=BLOCK, feature_map=feature_map)
    assert (actual - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("kind", ["local", "block_sparse", "linear"])
def test_what_a_kind_saves_for_backward_grows_with_the_sequence_and_not_with_its_square(kind: str) -> None:
    def saved_bytes(length: int) -> int:
        inputs = [tensor.requires_grad_() for tensor in make_inputs(length)]
        saved = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if kind == "linear":
                linear_attention(*inputs, block=BLOCK, feature_map="elu")
            else:
                window, num_global = (8, 0) if kind == "local" else (None, 1)
                run_blocked(inputs, Pattern(block=BLOCK, num_local=2, num_global=num_global, window=window))
        return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in saved}.values())

    assert saved_bytes(1024) < 2.01 * saved_bytes(512)
