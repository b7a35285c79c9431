"""Keys and values in 8 and 4 bits: the bound on their error, and that nothing else changes it."""

import pytest
import torch

from optimizer.formats.kv_packing import KV_BLOCK_TOKENS, KvLayout, KvShape
from optimizer.runtime.generation.kv_packing import KvPacker

BATCH, HEADS, DIM = 2, 3, 96
"""Sizes at which 32 channels of a value share a step."""


def layout_of(dtype: str, *, element_bytes: int = 4, key_dim: int = DIM, value_dim: int = DIM) -> KvLayout:
    shape = KvShape(
        batch_size=BATCH, num_heads=HEADS, key_dim=key_dim, value_dim=value_dim, element_bytes=element_bytes
    )
    return KvLayout(shape=shape, dtype=dtype, capacity=1000, window=None)


def tokens_of(num_tokens: int, *, dim: int = DIM, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Some channels are large in every token, as keys' are."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, BATCH, HEADS, dim, generator=generator)
    tokens[..., :2] += 20
    return tokens.to(dtype)


def packed(layout: KvLayout, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    records = torch.zeros(len(keys) // KV_BLOCK_TOKENS, layout.record_bytes, dtype=torch.uint8)
    lent = torch.full((layout.front_bytes,), 77, dtype=torch.uint8)
    KvPacker(layout, keys.dtype).pack(keys, values, records=records, lent=lent)
    return records


def unpacked(
    layout: KvLayout, records: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = layout.shape
    sizes = (len(records) * KV_BLOCK_TOKENS, BATCH, HEADS)
    keys, values = (torch.empty(*sizes, dim, dtype=dtype) for dim in (shape.key_dim, shape.value_dim))
    KvPacker(layout, dtype).unpack(records, keys=keys, values=values)
    return keys, values


def round_trip(dtype: str, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layout = layout_of(
        dtype, element_bytes=keys.element_size(), key_dim=keys.shape[-1], value_dim=values.shape[-1]
    )
    return unpacked(layout, packed(layout, keys, values), dtype=keys.dtype)


def half_steps_of_keys(dtype: str, keys: torch.Tensor) -> torch.Tensor:
    if dtype == "int8":
        return keys.abs().amax(dim=-1, keepdim=True) / 254
    blocks = keys.unflatten(0, (-1, KV_BLOCK_TOKENS))
    spans = blocks.amax(dim=1, keepdim=True) - blocks.amin(dim=1, keepdim=True)
    return (spans / 30).expand_as(blocks).flatten(0, 1)


def half_steps_of_values(dtype: str, values: torch.Tensor) -> torch.Tensor:
    if dtype == "int8":
        return values.abs().amax(dim=-1, keepdim=True) / 254
    groups = values.unflatten(-1, (-1, 32))
    spans = groups.amax(dim=-1, keepdim=True) - groups.amin(dim=-1, keepdim=True)
    return (spans / 30).expand_as(groups).flatten(-2)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_element_is_off_by_more_than_half_a_step(dtype: str) -> None:
    keys, values = tokens_of(192), tokens_of(192, seed=1)
    back_keys, back_values = round_trip(dtype, keys, values)
    rounding = 1e-5
    assert ((back_keys - keys).abs() <= half_steps_of_keys(dtype, keys) + rounding).all()
    assert ((back_values - values).abs() <= half_steps_of_values(dtype, values) + rounding).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_rounding_of_scales_and_results_comes_to_that(dtype: str, weights: torch.dtype) -> None:
    keys, values = tokens_of(128, dtype=weights), tokens_of(128, dtype=weights, seed=1)
    back_keys, back_values = (each.float() for each in round_trip(dtype, keys, values))
    relative = 3 * torch.finfo(weights).eps
    for back, given, half_steps in (
        (back_keys, keys.float(), half_steps_of_keys(dtype, keys.float())),
        (back_values, values.float(), half_steps_of_values(dtype, values.float())),
    ):
        largest = given.abs().amax()
        assert ((back - given).abs() <= half_steps + relative * largest).all()


def test_a_channel_that_is_large_costs_the_others_no_bits_of_their_keys() -> None:
    keys = tokens_of(64)
    plain = keys.clone()
    plain[..., :2] -= 20
    by_channel, _ = round_trip("int4", keys, keys)
    without, _ = round_trip("int4", plain, plain)
    assert torch.equal(by_channel[..., 2:], without[..., 2:])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_was_packed_and_unpacked_packs_to_the_same_codes(dtype: str) -> None:
    layout = layout_of(dtype)
    first = packed(layout, tokens_of(128), tokens_of(128, seed=1))
    again = unpacked(layout, packed(layout, *unpacked(layout, first)))
    for once, twice in zip(unpacked(layout, first), again, strict=True):
        torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_blocks_packed_together_are_those_packed_alone(dtype: str) -> None:
    layout = layout_of(dtype)
    keys, values = tokens_of(640), tokens_of(640, seed=1)
    together = packed(layout, keys, values)
    alone = [
        packed(layout, keys[start : start + 64], values[start : start + 64]) for start in range(0, 640, KV_BLOCK_TOKENS)
    ]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_constant_and_zero_tokens_come_back_as_they_were(dtype: str) -> None:
    for value in (0.0, 3.0):
        tokens = torch.full((64, BATCH, HEADS, DIM), value)
        for back in round_trip(dtype, tokens, tokens):
            torch.testing.assert_close(back, tokens, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_values_may_have_another_width_than_keys(dtype: str) -> None:
    keys, values = tokens_of(64, dim=24), tokens_of(64, dim=40, seed=1)
    back_keys, back_values = round_trip(dtype, keys, values)
    assert ((back_keys - keys).abs() <= half_steps_of_keys(dtype, keys) + 1e-5).all()
    assert back_values.shape == values.shape
    assert (back_values - values).abs().max() < 1.0


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.26), ("int4", 0.17)])
def test_records_are_a_fraction_of_the_tokens(dtype: str, share: float) -> None:
    layout = layout_of(dtype)
    assert layout.record_bytes / (KV_BLOCK_TOKENS * layout.shape.token_bytes) == pytest.approx(share, rel=0.05)
