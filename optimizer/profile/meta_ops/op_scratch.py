"""Memory that the CPU's kernels hold beside their arguments and results while one op runs, from the tensors it was called with.

As torch 2.11 to 2.13 has them, found with torch's profiler (``benchmarks/accuracy/meter.py``). Those that hold more than a few
numbers, with the file that says so:

element-wise           of arguments in a narrower dtype a copy in the common one, whole (TensorIterator.cpp).
cumsum, sum            the same of the argument, where the result is of another dtype (ReduceOps.cpp, TensorIterator.cpp).
safe softmax           whether each entry is minus infinity, a byte each, and whether all of a row are (attention.cpp).
embedding              ids, and in backward the gradient, in one piece where they are not (TensorAdvancedIndexing.cpp,
                       Embedding.cpp).
sort                   the values once more (Sorting.cpp).
attention              in backward the result's gradient in one piece, where it is not; and squares of scores for each thread,
                       of which only the sides are noted, for ``estimate/cpu/cpu_scratch.py`` (FlashAttentionKernel.cpp).
convolution            of which only the sizes are noted, for ``estimate/cpu/convolution_scratch.py``.
layer norm, softmax    what they read in one piece, where it is not, as behind a transpose (layer_norm.cpp, SoftMax.cpp).
gelu's backward        the gradient and the input once more, where only the input is in one piece: in fp32, exactly and
                       not by tanh, it is oneDNN's (Activation.cpp).

products               in bf16, and those in fp32 that linear layers make, of which only the sides are noted, for
                       ``estimate/cpu/matmul_scratch.py``.

*Not modelled*: partial sums of layer norm's backward, a row for each thread; matrix products in fp16, which a library makes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from optimizer.profile.meta_ops.convolution import Convolution

_ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "where", "maximum", "minimum", "addcmul", "pow", "atan2"})
_WHOLE_IN_RESULTS_DTYPE = frozenset({"cumsum", "cumprod"})
_READ_IN_ONE_PIECE = {
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
}
"""The number of first arguments that the kernel reads in one piece."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0}
"""Tensors that come before what is multiplied, by op."""
_OF_LAYERS = frozenset({"mm", "addmm", "addmm_"})
_CONVOLUTION = "convolution"
_CONVOLUTION_BACKWARD = "convolution_backward"
_MANY_TAPS = 3
"""A kernel whose sides are above it makes torch take the library even for one small image."""
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FLAG_BYTES = 1
_NUMBER_BYTES = 4


class Scratch(NamedTuple):
    """Scratch of one op."""

    num_bytes: int = 0
    """Bytes of scratch, the same whatever the number of threads."""
    sides: tuple[int, ...] = ()
    """Sides of attention: the query's length, the keys' length, the width of a head. Of a product that a library may
    make: how many, rows, columns of the first, columns of the second; of a grouped one as if one group had it all.
    Empty for other ops."""
    convolution: tuple[int, ...] = ()
    """The fields of ``convolution.Convolution``. Empty for other ops."""


NO_SCRATCH = Scratch()


def read_scratch(
    name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, args: Sequence[Any] = ()
) -> Scratch:
    """Read an op's scratch. name: of the overload, like ``aten.mul.Tensor``. inputs: tensors among its arguments, in
    order. args: all of them, those by keyword last.
    """
    base = name.split(".")[1] if name.startswith("aten.") else ""
    if base.startswith(_FLASH):
        return _attention(base, inputs)
    if base in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
        return Scratch(convolution=tuple(_convolution(args, outputs, is_backward=base == _CONVOLUTION_BACKWARD)))
    if not inputs or not outputs:
        return NO_SCRATCH
    result = outputs[0]
    if base in _PRODUCTS:
        is_librarys = result.dtype == torch.bfloat16 or (result.dtype == torch.float32 and base in _OF_LAYERS)
        return _product(inputs[_PRODUCTS[base] :]) if is_librarys else NO_SCRATCH
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
    if base in _READ_IN_ONE_PIECE:
        return Scratch(_gathered_bytes(inputs[: _READ_IN_ONE_PIECE[base]]))
    if base == "gelu_backward":
        gradient, argument = inputs[:2]
        is_librarys = argument.dtype == torch.float32 and not any(each == "tanh" for each in args if isinstance(each, str))
        is_copied = is_librarys and argument.is_contiguous() and not gradient.is_contiguous()
        return Scratch((gradient.nbytes + argument.nbytes) * is_copied)
    return NO_SCRATCH


def _product(operands: Sequence[torch.Tensor]) -> Scratch:
    first, second = operands[:2]
    return Scratch(sides=(prod(first.shape[:-2]), *first.shape[-2:], second.shape[-1]))


def _attention(base: str, inputs: Sequence[torch.Tensor]) -> Scratch:
    is_backward = base.endswith("backward")
    query, key = inputs[1:3] if is_backward else inputs[:2]
    # The gradient is read token by token, every head of one beside the others.
    by_token = [inputs[0].transpose(1, 2)] if is_backward else []
    return Scratch(_gathered_bytes(by_token), (query.shape[-2], key.shape[-2], query.shape[-1]))


def _convolution(args: Sequence[Any], outputs: Sequence[torch.Tensor], *, is_backward: bool) -> Convolution:
    gradient: torch.Tensor | None = args[0] if is_backward else None
    taken: torch.Tensor
    taken, weight, bias, stride, _, dilation, is_transposed, _, groups, *rest = args[1:] if is_backward else args
    result = outputs[0] if gradient is None else gradient
    wanted = rest[0] if is_backward else (False, False, bias is not None)
    kernel = weight.shape[2:]
    gathered = [tensor for tensor in (taken, gradient) if tensor is not None and not tensor.is_contiguous()]
    return Convolution(
        batch=taken.shape[0],
        in_channels=taken.shape[1],
        out_channels=result.shape[1],
        in_pixels=prod(taken.shape[2:]),
        out_pixels=prod(result.shape[2:]),
        taps=prod(kernel),
        groups=groups,
        element_bytes=taken.element_size(),
        gathered_bytes=sum(tensor.nbytes for tensor in gathered),
        # Of one axis, torch lays a second of length one before it.
        kernel_is_large=int(len(kernel) > 1 and min(kernel[-2:]) > _MANY_TAPS),
        is_pointwise=int(prod(kernel) == 1),
        is_strided=int(max(stride) > 1),
        is_dilated=int(max(dilation) > 1),
        is_transposed=int(is_transposed),
        gives_input_gradient=int(is_backward and wanted[0]),
        gives_weight_gradient=int(is_backward and wanted[1]),
        has_bias=int(wanted[2]),
    )


def _converted_bytes(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> int:
    """Single numbers are converted as they are read."""
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor in tensors
        if tensor.dim() and tensor.dtype not in (dtype, torch.bool)
    )


def _gathered_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
