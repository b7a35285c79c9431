"""The class of an op and its FLOPs, from the shapes of its tensors, for the runtime and the profile alike.

Torch-free: names are those of ATen's overloads.

A multiply-add counts as two. Causal attention counts half of the square, which is what fused kernels compute. Element-wise
ops count one per element written; their time is decided by bytes anyway.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

OpKind = Literal["matmul", "attention", "memory", "copy_out", "copy_in"]
"""``copy_out`` is device to host, ``copy_in`` host to device."""

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
ADDING = frozenset({"addmm", "baddbmm"})
"""Products whose first argument is a tensor that they are added to."""
GROUPED_PRODUCT = "_grouped_mm"
"""The op that multiplies by one matrix for each expert that some token chose."""
_ATTENTION_PREFIX = "_scaled_dot_product"
WHOLE = "whole"
"""The form of attention that is not causal, with a mask or without. Its FLOPs are counted whole, and run at another rate: a
causal kernel computes some of those that are not counted (on the CPU all, up to 512 keys)."""
FUSED_KERNEL = "inductor.fused.default"
"""A kernel of compiled code, which moves what several element-wise ops and sums would, once."""
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

Dims = Sequence[int]


@cache
def base_name(name: str) -> str:
    """``tanh`` of ``aten.tanh.default``; a name without namespace and overload stays."""
    return name.split(".")[1] if name.count(".") >= 2 else name


def classify_op(name: str) -> OpKind:
    """The class of an op by its name, such as ``aten.mm.default``."""
    base = base_name(name)
    if base in _MATMULS:
        return "matmul"
    return "attention" if base.startswith(_ATTENTION_PREFIX) else "memory"


def count_flops(name: str, inputs: Sequence[Dims], outputs: Sequence[Dims], *, is_causal: bool = False) -> int:
    """Count an op's FLOPs. inputs, outputs: shapes of the tensors, in the order of the schema."""
    base = base_name(name)
    if base in _MATMULS:
        return _matmul_flops(base, inputs)
    if base.startswith(_ATTENTION_PREFIX):
        return _attention_flops(base, inputs, is_causal=is_causal)
    if base in ALLOCATIONS:
        return 0
    return sum(math.prod(dims) for dims in outputs)


def _matmul_flops(base: str, inputs: Sequence[Dims]) -> int:
    if base in ADDING:
        inputs = inputs[1:]
    left, right = inputs[0], inputs[1]
    return 2 * math.prod(left) * right[-1]


def _attention_flops(base: str, inputs: Sequence[Dims], *, is_causal: bool) -> int:
    """Count two products of the square forward, and five backward, which computes the scores again."""
    is_backward = base.endswith("backward")
    query, key, value = inputs[1:4] if is_backward else inputs[0:3]
    batch, heads, length, dim = query
    square = batch * heads * length * key[-2]
    products = 2 * square * (3 * dim + 2 * value[-1]) if is_backward else 2 * square * (dim + value[-1])
    return products // 2 if is_causal else products
