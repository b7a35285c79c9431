"""Kernels without data for the ops whose own are wrong for the CPU, or whose own are in Python, which takes long to import.

Each returns what the op returns on the CPU, as tensors of the right layout on ``meta``. Where neither this file nor torch's C++
has a kernel, torch's Python ones are imported after all (``lean.import_meta_kernels``), so a model of any kind can be traced, and
common ones quickly. A test holds each of these to torch's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizer.profile.meta_ops.stub_imports import import_meta_kernels

Result = torch.Tensor | tuple[torch.Tensor | None, ...]
_HEADS_INSIDE = (0, 2, 1, 3)
"""The CPU's fused attention writes gradients as (batch, length, head, dim)."""


def run_fresh(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that returns new tensors. func: an op, as a dispatch mode is given it."""
    kernel = _KERNELS.get(func)
    return run_torchs(func, args, kwargs) if kernel is None else kernel(*args, **kwargs)


def run_torchs(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op by torch's own kernel, which may have to be imported first."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if not import_meta_kernels():
            raise
        return func(*args, **kwargs)


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, num_rows: int, *_: Any) -> torch.Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]))


def _of_one(source: torch.Tensor) -> torch.Tensor:
    # Has a kernel in C++, and lays its result out as every op of one tensor does.
    return torch.clamp_min(source, 0)


def _where(condition: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Another op of three tensors, with a kernel in C++; the result's layout depends on their layouts alone.
    layouts = [torch.empty_strided(source.shape, source.stride(), device="meta") for source in (condition, one, other)]
    result = torch.addcmul(*layouts)
    return torch.empty_strided(result.shape, result.stride(), dtype=torch.result_type(one, other), device="meta")


def _safe_softmax(source: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax as aten/src/ATen/native/transformers/attention.cpp puts it together."""
    result = torch.softmax(source, dim, dtype)
    is_masked = torch.all(source.eq(float("-inf")), dim, keepdim=True)
    return _where(is_masked, result.new_empty(()), result)


def _layer_norm(
    source: torch.Tensor, dims: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, _epsilon: float
) -> Result:
    """The CPU's statistics are in the dtype of the parameters (layer_norm_cpu in aten/src/ATen/native/layer_norm.cpp)."""
    outside = source.dim() - len(dims)
    given = [source if parameter is None else parameter for parameter in (weight, bias)]
    statistics = (
        source.new_empty((*source.shape[:outside], *(1 for _ in dims)), dtype=given[0].dtype) for _ in ("mean", "deviation")
    )
    return (torch.empty_like(source, memory_format=torch.contiguous_format), *statistics)


def _layer_norm_backward(
    grad: torch.Tensor,
    source: torch.Tensor,
    dims: Sequence[int],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: Sequence[bool],
) -> Result:
    of_source = torch.empty_like(source, memory_format=torch.contiguous_format) if wanted[0] else None
    of_others = (
        torch.empty_like(other, memory_format=torch.contiguous_format) if is_wanted and other is not None else None
        for other, is_wanted in zip((weight, bias), wanted[1:], strict=True)
    )
    return (of_source, *of_others)


def _group_norm(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_images: int,
    _channels: int,
    _pixels: int,
    num_groups: int,
    _epsilon: float,
) -> Result:
    """Statistics as layer norm's (native_group_norm in aten/src/ATen/native/group_norm.cpp)."""
    given = [source if parameter is None else parameter for parameter in (weight, bias)]
    statistics = (source.new_empty((num_images, num_groups), dtype=given[0].dtype) for _ in ("mean", "deviation"))
    return (torch.empty_like(source), *statistics)


def _group_norm_backward(
    _grad: torch.Tensor,
    source: torch.Tensor,
    _mean: torch.Tensor,
    _deviation: torch.Tensor,
    weight: torch.Tensor | None,
    *sizes_and_wanted: Any,
) -> Result:
    """The bias's gradient is made like the weight's."""
    wanted: Sequence[bool] = sizes_and_wanted[-1]
    made = (source, weight, weight)
    return tuple(
        torch.empty_like(other) if is_wanted and other is not None else None
        for other, is_wanted in zip(made, wanted, strict=True)
    )


def _flash_attention(query: torch.Tensor, *_: Any, **__: Any) -> Result:
    batch, heads, length, _dim = query.shape
    sums = query.new_empty((batch, length, heads), dtype=_summed_in(query.dtype)).transpose(1, 2)
    return torch.empty_like(query), sums


def _flash_attention_backward(_grad: torch.Tensor, *inputs: Any, **_: Any) -> Result:
    return tuple(
        torch.empty_permuted(source.shape, _HEADS_INSIDE, dtype=source.dtype, device=source.device) for source in inputs[:3]
    )


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, **more: Any) -> Any:
    """torch's asks for bf16; the real one takes fp32 on the CPU. Strides are then those of a fresh tensor."""
    if left.dtype != torch.float32:
        return run_torchs(torch.ops.aten._grouped_mm.default, (left, right, offsets), more)
    if right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[-1]))
    ends = more["offs"] if offsets is None else offsets
    return left.new_empty((ends.shape[0], left.shape[0], right.shape[-1]))


def _batch_norm(source: torch.Tensor, *rest: Any) -> Result:
    """The CPU's statistics are in the input's dtype unless a parameter's is wider, and empty outside training (batch_norm_cpu in
    aten/src/ATen/native/Normalization.cpp).
    """
    given, is_training = rest[:4], rest[4]
    output, mean, deviation = run_torchs(torch.ops.aten.native_batch_norm.default, (source, *rest), {})
    is_mixed = any(tensor is not None and tensor.dtype != source.dtype for tensor in given)
    dtype = torch.float32 if is_mixed else source.dtype
    sizes = [tensor.shape if is_training else (0,) for tensor in (mean, deviation)]
    return (output, *(tensor.new_empty(size, dtype=dtype) for tensor, size in zip((mean, deviation), sizes, strict=True)))


_KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_attention_backward,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
    torch.ops.aten.abs.default: _of_one,
    torch.ops.aten.embedding.default: _embedding,
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.aten.relu.default: _of_one,
    torch.ops.aten.where.self: _where,
}
