"""Ops without data return tensors laid out as the CPU's: dtype, size and strides."""

from typing import Any

import pytest
import torch

from optimizer.profile.meta_ops.kernels import _KERNELS, run_fresh

ATEN = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16


def heads(dtype: torch.dtype, *, length: int = 5, dim: int = 8) -> torch.Tensor:
    """(batch, head, length, dim) as a projection leaves it, all heads of a token together."""
    return torch.randn(2, length, 4, dim).to(dtype).transpose(1, 2)


def attention(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (heads(dtype), heads(dtype, length=7), heads(dtype, length=7))


def attention_backward(dtype: torch.dtype) -> tuple[Any, ...]:
    query, key, value = attention(dtype)
    result, sums = ATEN._scaled_dot_product_flash_attention_for_cpu.default(query, key, value)
    return (torch.ones_like(result), query, key, value, result, sums, 0.0, False)


def layer_norm(
    dtype: torch.dtype, of_parameters: torch.dtype, *, sources: tuple[int, ...] = (2, 3, 8)
) -> tuple[Any, list[Any], Any, Any]:
    return (torch.randn(sources).to(dtype), [8], torch.ones(8, dtype=of_parameters), torch.zeros(8, dtype=of_parameters))


def layer_norm_backward(
    dtype: torch.dtype, *, wanted: tuple[bool, ...] = (True, True, True), transposed: bool = False
) -> tuple[Any, Any, Any, Any, Any, Any, Any, list[Any]]:
    source, dims, weight, bias = layer_norm(dtype, dtype)
    source = source.transpose(0, 1) if transposed else source
    result, mean, deviation = ATEN.native_layer_norm.default(source, dims, weight, bias, 1e-5)
    return (torch.ones_like(result), source, dims, mean, deviation, weight, bias, list(wanted))


def group_norm(
    dtype: torch.dtype, of_parameters: torch.dtype, *, format: torch.memory_format = torch.contiguous_format
) -> tuple[Any, ...]:
    images = torch.randn(2, 8, 4, 4).to(dtype).contiguous(memory_format=format)
    return (images, torch.ones(8, dtype=of_parameters), torch.zeros(8, dtype=of_parameters), 2, 8, 16, 4, 1e-5)


def group_norm_backward(
    dtype: torch.dtype, of_parameters: torch.dtype, *, wanted: tuple[bool, ...] = (True, True, True)
) -> tuple[Any, Any, Any, Any, Any, Any, list[Any]]:
    images, weight, _, *sizes, _ = args = group_norm(dtype, of_parameters)
    result, mean, deviation = ATEN.native_group_norm.default(*args)
    return (torch.ones_like(result), images, mean, deviation, weight, *sizes, list(wanted))


def batch_norm(dtype: torch.dtype, *, is_training: bool) -> tuple[Any, ...]:
    ones, zeros = torch.ones(3), torch.zeros(3)
    return (torch.randn(2, 3, 4, 4).to(dtype), ones, zeros, zeros, ones, is_training, 0.1, 1e-5)


IDS = torch.tensor([[0, 2, 1], [2, 2, 0]])
CASES = {
    "attention": (ATEN._scaled_dot_product_flash_attention_for_cpu.default, attention(FP32)),
    "attention in bf16": (ATEN._scaled_dot_product_flash_attention_for_cpu.default, attention(BF16)),
    "attention backward": (ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward(FP32)),
    "attention backward in bf16": (
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
        attention_backward(BF16),
    ),
    "embedding": (ATEN.embedding.default, (torch.randn(4, 6), IDS)),
    "embedding of one token": (ATEN.embedding.default, (torch.randn(4, 6), torch.tensor(1))),
    "embedding backward": (ATEN.embedding_dense_backward.default, (torch.randn(2, 3, 6), IDS, 4, -1, False)),
    "embedding backward in bf16": (
        ATEN.embedding_dense_backward.default,
        (torch.randn(2, 3, 6).to(BF16), IDS, 4, 0, False),
    ),
    "layer norm": (ATEN.native_layer_norm.default, (*layer_norm(FP32, FP32), 1e-5)),
    "layer norm in bf16": (ATEN.native_layer_norm.default, (*layer_norm(BF16, BF16), 1e-5)),
    "layer norm under autocast": (ATEN.native_layer_norm.default, (*layer_norm(BF16, FP32), 1e-5)),
    "layer norm without parameters": (ATEN.native_layer_norm.default, (torch.randn(2, 8), [8], None, None, 1e-5)),
    "layer norm backward": (ATEN.native_layer_norm_backward.default, layer_norm_backward(FP32)),
    "layer norm backward, turned": (ATEN.native_layer_norm_backward.default, layer_norm_backward(FP32, transposed=True)),
    "layer norm backward, frozen": (
        ATEN.native_layer_norm_backward.default,
        layer_norm_backward(BF16, wanted=(True, False, False)),
    ),
    "group norm": (ATEN.native_group_norm.default, group_norm(FP32, FP32)),
    "group norm under autocast": (ATEN.native_group_norm.default, group_norm(BF16, FP32)),
    "group norm, channels innermost": (
        ATEN.native_group_norm.default,
        group_norm(FP32, FP32, format=torch.channels_last),
    ),
    "group norm without parameters": (ATEN.native_group_norm.default, (torch.randn(2, 8, 4), None, None, 2, 8, 4, 4, 1e-5)),
    "group norm backward": (ATEN.native_group_norm_backward.default, group_norm_backward(FP32, FP32)),
    "group norm backward under autocast": (ATEN.native_group_norm_backward.default, group_norm_backward(BF16, FP32)),
    "group norm backward, frozen": (
        ATEN.native_group_norm_backward.default,
        group_norm_backward(BF16, BF16, wanted=(True, False, False)),
    ),
    "relu": (ATEN.relu.default, (torch.randn(2, 3, 4),)),
    "relu, turned": (ATEN.relu.default, (torch.randn(2, 3, 4).transpose(0, 2),)),
    "absolute values": (ATEN.abs.default, (torch.arange(6).view(2, 3),)),
    "where, of a mask": (
        ATEN.where.self,
        (torch.ones(2, 1, 3, 4, dtype=torch.bool), heads(FP32, length=3, dim=4), torch.tensor(0)),
    ),
    "where, turned": (ATEN.where.self, (torch.ones(4, 3, dtype=torch.bool).T, torch.randn(3, 1).to(BF16), torch.randn(4))),
    "where, of numbers": (ATEN.where.self, (torch.ones(3, dtype=torch.bool), torch.tensor(0.0), torch.tensor(1))),
    "safe softmax": (ATEN._safe_softmax.default, (torch.randn(2, 3, 4, 4), -1)),
    "safe softmax, turned": (ATEN._safe_softmax.default, (torch.randn(2, 3, 4, 5).to(BF16).transpose(1, 2), -1)),
    "grouped product": (
        ATEN._grouped_mm.default,
        (torch.randn(8, 16), torch.randn(2, 16, 16), torch.tensor([4, 8], dtype=torch.int32)),
    ),
    "grouped product of groups": (
        ATEN._grouped_mm.default,
        (torch.randn(16, 8), torch.randn(8, 16), torch.tensor([4, 8], dtype=torch.int32)),
    ),
    "batch norm": (ATEN.native_batch_norm.default, batch_norm(FP32, is_training=True)),
    "batch norm in bf16": (ATEN.native_batch_norm.default, batch_norm(BF16, is_training=True)),
    "batch norm outside training": (ATEN.native_batch_norm.default, batch_norm(FP32, is_training=False)),
}


def layouts(results: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    listed = results if isinstance(results, tuple | list) else (results,)
    return [None if result is None else (result.dtype, tuple(result.shape), result.stride()) for result in listed]


@pytest.mark.parametrize("name", CASES)
def test_results_without_data_are_laid_out_as_real_ones(name: str) -> None:
    op, args = CASES[name]
    on_meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
    assert layouts(run_fresh(op, on_meta, {})) == layouts(op(*args))


def test_every_kernel_of_ours_is_held_to_the_real_one() -> None:
    assert {op for op, _ in CASES.values()} == set(_KERNELS)
