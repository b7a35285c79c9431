"""Attention as one node: what it returns, its gradients, and how little it saves."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from optimizer.models.decoder.attention_node import Heads
from optimizer.models.decoder.blocks import Attention, cut_heads, make_rotary, rotate
from optimizer.models.decoder.model import DecoderConfig
from optimizer.models.spec import read_model_spec
from tests.optimizer.models.decoder.test_decoder import BASE

KINDS = ("local", "block_sparse", "linear")
LENGTHS = (5, 13, 16, 40)
"""Shorter than a block, in between, and whole blocks."""
CHANGES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "a key head for each": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "apart": {"fused_qkv": False, "use_bias": True},
    "no positions": {"positions": "none"},
    "relu": {"linear_feature_map": "relu"},
}
ROUNDING = 1e-12
"""Tolerance for the rounding of fp64."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_attention(kind: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Attention:
    config = DecoderConfig(read_model_spec({**BASE, "layer_types": [kind] * 4, **changes}).config)
    torch.manual_seed(0)
    return Attention(config, kind, dtype=dtype)


def make_hidden(length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn((2, length, 32), generator=generator, dtype=dtype).requires_grad_()


def rotary_of(attention: Attention, hidden: torch.Tensor) -> Any:
    if attention.config.positions != "rope":
        return None
    dim = attention.config.head_dim
    return make_rotary(hidden.shape[1], head_dim=dim, theta=1e4, dtype=hidden.dtype, device=hidden.device)


def run_dense(attention: Attention, hidden: torch.Tensor) -> torch.Tensor:
    """The kind's quadratic form over all pairs of tokens, by autograd."""
    config, kind = attention.config, attention.kind
    if config.fused_qkv:
        columns = attention.qkv_proj(hidden).split(attention.sizes, dim=-1)
    else:
        columns = (attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden))
    query, key, value = (cut_heads(part, config.head_dim) for part in columns)
    rotary = rotary_of(attention, hidden)
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    places = torch.arange(hidden.shape[1])
    later, earlier = places.unsqueeze(1), places.unsqueeze(0)
    if kind == "linear":
        query, key = (F.relu(x) if config.linear_feature_map == "relu" else F.elu(x) + 1 for x in (query, key))
        scores = (query @ key.transpose(2, 3)).tril()
        weights = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    else:
        block = config.attention_block
        is_near = later // block - earlier // block < config.sparse_local_blocks
        is_seen = is_near | (earlier // block < config.sparse_global_blocks)
        if kind == "local":
            is_seen = later - earlier < config.local_window
        scores = query @ key.transpose(2, 3) / config.head_dim**0.5
        weights = scores.masked_fill(~(is_seen & (earlier <= later)), float("-inf")).softmax(-1)
    return attention.o_proj((weights @ value).transpose(1, 2).flatten(2))


def gradients_of(result: torch.Tensor, attention: Attention, hidden: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result).to(result.dtype)
    return list(torch.autograd.grad((result * weight).sum(), [hidden, *attention.parameters()]))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_results_and_gradients_are_the_quadratic_forms(kind: str, name: str, length: int) -> None:
    attention, hidden = make_attention(kind, **CHANGES[name]), make_hidden(length)
    actual = attention(hidden, rotary=rotary_of(attention, hidden))
    expected = run_dense(attention, hidden)
    assert (actual - expected).abs().max() < ROUNDING
    both = [gradients_of(result, attention, hidden) for result in (actual, expected)]
    for one, other in zip(*both, strict=True):
        assert (one - other).abs().max() < ROUNDING * max(1.0, float(other.abs().max()))


def run_all_heads_at_once(attention: Attention, hidden: torch.Tensor) -> torch.Tensor:
    """The same functions under autograd, which saves whatever they make."""
    columns = attention.qkv_proj(hidden)
    attend = attention._prepare(columns, rotary_of(attention, hidden) or ())
    return attention.o_proj(attend(columns.split(attention.sizes, dim=-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["local", "block_sparse"])
def test_blocked_results_and_gradients_have_the_bits_of_all_heads_at_once(kind: str, dtype: torch.dtype) -> None:
    attention, hidden = make_attention(kind, dtype=dtype), make_hidden(40, dtype)
    results = attention(hidden, rotary=rotary_of(attention, hidden)), run_all_heads_at_once(attention, hidden)
    assert torch.equal(*results)
    for one, other in zip(*(gradients_of(result, attention, hidden) for result in results), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_runs_under_the_autocast_of_forward(kind: str) -> None:
    attention, hidden = make_attention(kind, dtype=torch.float32), make_hidden(40, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        results = attention(hidden, rotary=rotary_of(attention, hidden)), run_all_heads_at_once(attention, hidden)
    assert results[0].dtype == results[1].dtype
    both = [gradients_of(result, attention, hidden) for result in results]
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        # Rounding of bf16: the products of linear attention have other shapes.
        assert (one - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.parametrize("fused_qkv", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_projected_is_saved(kind: str, fused_qkv: bool) -> None:
    attention, hidden = make_attention(kind, fused_qkv=fused_qkv), make_hidden(40)
    rotary = rotary_of(attention, hidden)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = attention(hidden, rotary=rotary)
    for tensor in (hidden, *rotary, *attention.parameters()):
        saved.pop(tensor.untyped_storage()._cdata, None)
    # Queries, keys and values, and attention's result, which the output projection saves.
    assert sum(saved.values()) == (sum(attention.sizes) + attention.sizes[0]) * 2 * 40 * 8
    assert result.requires_grad


def test_a_second_backward_has_the_same_gradients() -> None:
    attention, hidden = make_attention("local"), make_hidden(16)
    result = attention(hidden, rotary=rotary_of(attention, hidden)).sum()
    first, second = (torch.autograd.grad(result, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_on_weights_draws_its_numbers_once() -> None:
    attention, hidden = make_attention("local", attention_dropout=0.5), make_hidden(16)
    attention.train()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        result = attention(hidden, rotary=rotary_of(attention, hidden))
        results.append(torch.autograd.grad(result.sum(), hidden)[0])
    assert torch.equal(*results)
    assert not torch.equal(attention(hidden), attention.eval()(hidden))


def test_training_begun_before_backward_adds_no_dropout() -> None:
    attention, hidden = make_attention("local", attention_dropout=0.5).eval(), make_hidden(16)
    results = [attention(hidden, rotary=rotary_of(attention, hidden)).sum() for _ in range(2)]
    expected = torch.autograd.grad(results[0], hidden)[0]
    attention.train()
    assert torch.equal(torch.autograd.grad(results[1], hidden)[0], expected)


def column_numbers(heads: Heads, *, is_fused: bool) -> Iterator[list[slice]]:
    for place in range(3):
        yield [run.columns[place] for run in heads.runs(is_fused=is_fused)]


@pytest.mark.parametrize("groups_at_once", [1, 2, 4])
def test_runs_take_every_column_once(groups_at_once: int) -> None:
    heads = Heads(num_heads=8, num_groups=4, head_dim=6, groups_at_once=groups_at_once)
    for is_fused, (firsts, ends) in ((True, ((0, 48, 72), (48, 72, 96))), (False, ((0, 0, 0), (48, 24, 24)))):
        for places, first, end in zip(column_numbers(heads, is_fused=is_fused), firsts, ends, strict=True):
            assert (places[0].start, places[-1].stop) == (first, end)
            assert all(one.stop == other.start for one, other in pairwise(places))
