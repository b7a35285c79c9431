"""What the CPU's kernels hold beside their arguments and results while one op runs, from the tensors it was called with.

As torch 2.11 to 2.13 has them, found with torch's profiler (``benchmarks/accuracy/meter.py``). Those that hold more than a few
numbers, with the file that says so:

element-wise           of arguments in a narrower dtype a copy in the common one, whole (TensorIterator.cpp).
cumsum, sum            the same of the argument, where the result is of another dtype (ReduceOps.cpp, TensorIterator.cpp).
safe softmax           whether each entry is minus infinity, a byte each, and whether all of a row are (attention.cpp).
embedding              ids, and in backward the gradient, in one piece where they are not (TensorAdvancedIndexing.cpp,
                       Embedding.cpp).
sort                   the values once more (Sorting.cpp).
attention              in backward the result's gradient in one piece, where it is not; and squares of scores for each thread,
                       of which only the sides are noted, for ``estimate/cpu_scratch.py`` (FlashAttentionKernel.cpp).

*Not modelled*: partial sums of layer norm's backward, a row for each thread; matrix products in 16 bits, which a library makes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "where", "maximum", "minimum", "addcmul", "pow", "atan2"})
_WHOLE_IN_RESULTS_DTYPE = frozenset({"cumsum", "cumprod"})
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FLAG_BYTES = 1
_NUMBER_BYTES = 4


class Scratch(NamedTuple):
    """Of one op."""

    num_bytes: int = 0
    """The same whatever the number of threads."""
    square: tuple[int, ...] = ()
    """Of attention: the query's length, the keys' length, the width of a head. Empty for other ops."""


NO_SCRATCH = Scratch()


def read_scratch(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Scratch:
    """name: of the overload, like ``aten.mul.Tensor``. inputs: tensors among its arguments, in order."""
    base = name.split(".")[1] if name.startswith("aten.") else ""
    if base.startswith(_FLASH):
        return _attention(base, inputs)
    if not inputs or not outputs:
        return NO_SCRATCH
    result = outputs[0]
    if base in _ELEMENTWISE:
        return Scratch(_converted_bytes(inputs, result.dtype))
    if base in _WHOLE_IN_RESULTS_DTYPE:
        return Scratch(_converted_bytes(inputs[:1], result.dtype))
    if base == "sum" and not inputs[0].is_floating_point():
        return Scratch(_converted_bytes(inputs[:1], result.dtype))
    if base == "_safe_softmax":
        num_rows = result.numel() // max(1, result.shape[-1])
        return Scratch(_FLAG_BYTES * (result.numel() + num_rows) + _NUMBER_BYTES)
    if base == "embedding":
        return Scratch(_gathered_bytes(inputs[1:2]))
    if base == "embedding_dense_backward":
        return Scratch(_gathered_bytes(inputs[:2]))
    if base == "sort":
        return Scratch(result.nbytes)
    return NO_SCRATCH


def _attention(base: str, inputs: Sequence[torch.Tensor]) -> Scratch:
    is_backward = base.endswith("backward")
    query, key = inputs[1:3] if is_backward else inputs[:2]
    # The gradient is read token by token, every head of one beside the others.
    by_token = [inputs[0].transpose(1, 2)] if is_backward else []
    return Scratch(_gathered_bytes(by_token), (query.shape[-2], key.shape[-2], query.shape[-1]))


def _converted_bytes(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> int:
    """Single numbers are converted as they are read."""
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in tensors
        if tensor.dim() and tensor.dtype not in (dtype, torch.bool)
    )


def _gathered_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
