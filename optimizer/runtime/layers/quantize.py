"""Matrices in 8 or 4 bits: packed once, unpacked for each product.

int8  one signed byte per element and one scale for each output, ``largest / 127`` rounded to the weights' dtype first, so that
      packing and unpacking use the same number.
int4  two elements a byte, in even steps between the least and the largest of each 64 elements in the order of memory; of each 64
      the step and the least in fp16 (the scheme of FlexGen, Sheng et al. 2023, section 4.3). Plain torch.
nf4   two elements a byte and one fp32 scale for each 64 elements in the order of memory (Dettmers et al. 2023, QLoRA), without
      double quantization; packed and unpacked by bitsandbytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.base.optional import load_bitsandbytes
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS
from optimizer.plan.weights import FrozenFormat

NF4_BLOCK_ELEMENTS = 64
INT4_GROUP_ELEMENTS = 64
_INT8_MAX = 127
_INT4_MAX = 15


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """The packing of one tensor, and its form before."""

    form: FrozenFormat
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def pack(
    weight: torch.Tensor, form: FrozenFormat, *, input_dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, PackedForm]:
    """Packed bytes and scales (int4: steps, then least values). input_dim: the dimension over which products sum; int8 has one
    scale for all of it.
    """
    weight = weight.detach()
    packed_form = PackedForm(form=form, shape=tuple(weight.shape), dtype=weight.dtype)
    if form == "int8":
        return *_pack_int8(weight, input_dim), packed_form
    if form == "int4":
        return *_pack_int4(weight), packed_form
    return *_pack_nf4(weight), packed_form


def unpack(packed: torch.Tensor, scales: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """The matrix in the dtype it had, a new tensor, and the same bits each time. Beside it int4 takes half a byte an element
    for a moment, the others nothing.
    """
    if form.form == "int8":
        return packed.to(form.dtype).mul_(scales)
    if form.form == "int4":
        return _unpack_int4(packed, scales, form)
    blocks = (scales.numel(), NF4_BLOCK_ELEMENTS)
    flat = _bitsandbytes_ops().dequantize_4bit(packed, scales, NF4_BLOCK_ELEMENTS, "nf4", blocks, form.dtype)
    weight: torch.Tensor = flat.view(-1)[: form.num_elements].view(form.shape)
    return weight


def pack_in_pieces(weight: torch.Tensor, form: FrozenFormat, *, input_dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """``pack`` without its scratch: a piece of the weight at a time, to the same bits; where the weight is. Beside the weight
    there is the result, and what packing one piece takes (``estimate/categories/reading.py``).
    """
    weight = weight.detach()
    if weight.numel() <= PIECE_ELEMENTS:
        return pack(weight, form, input_dim=input_dim)[:2]
    if form != "int8":
        flat = weight.reshape(-1)
        num_groups = -(-flat.numel() // INT4_GROUP_ELEMENTS)
        packed = flat.new_empty(num_groups * INT4_GROUP_ELEMENTS // 2, dtype=torch.uint8)
        shape, dtype = ((num_groups,), torch.float32) if form == "nf4" else ((2, num_groups), torch.float16)
        scales = flat.new_empty(shape, dtype=dtype)
        splits = (torch.split(packed, PIECE_ELEMENTS // 2), torch.split(scales, PIECE_ELEMENTS // INT4_GROUP_ELEMENTS, dim=-1))
        for piece, *into in zip(torch.split(flat, PIECE_ELEMENTS), *splits, strict=True):
            _pack_into(piece, form, -1, into)
        return packed, scales
    sums_last = input_dim in (-1, weight.dim() - 1)
    matrix = weight.flatten(0, -2) if sums_last else weight
    split_dim = 0 if sums_last else 1
    num_at_once = max(1, PIECE_ELEMENTS * matrix.shape[split_dim] // matrix.numel())
    packed = torch.empty_like(matrix, dtype=torch.int8)
    scales = matrix.new_empty((matrix.shape[0], 1) if sums_last else (1, matrix.shape[1]))
    for piece, *into in zip(*(torch.split(each, num_at_once, dim=split_dim) for each in (matrix, packed, scales)), strict=True):
        _pack_into(piece, "int8", -1 if sums_last else 0, into)
    return packed.view(weight.shape), scales.view(*weight.shape[:-1], 1) if sums_last else scales


def pack_parameter(
    weight: torch.Tensor, form: FrozenFormat, *, input_dim: int, device: torch.device | None
) -> tuple[nn.Parameter, nn.Parameter, PackedForm]:
    """Pack as parameters without gradient, where the weight was; ``device``: where to pack.

    The last of the three says how to unpack them.
    """
    moves = device is not None and not weight.is_meta
    packed, scales, packed_form = pack(weight.to(device) if moves else weight, form, input_dim=input_dim)
    packed, scales = (nn.Parameter(made.to(weight.device), requires_grad=False) for made in (packed, scales))
    return packed, scales, packed_form


def _pack_into(piece: torch.Tensor, form: FrozenFormat, input_dim: int, into: Sequence[torch.Tensor]) -> None:
    """Packs a piece to its place. It is a function, so that nothing of a piece is left when the next is packed."""
    for target, made in zip(into, pack(piece, form, input_dim=input_dim)[:2], strict=True):
        target.copy_(made)


def _pack_int8(weight: torch.Tensor, input_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(dim=input_dim, keepdim=True)
    scales = (largest.to(torch.float32) / _INT8_MAX).to(weight.dtype)
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).to(torch.float32)
    packed = weight.to(torch.float32).div(divisor).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return packed.to(torch.int8), scales


def _pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = F.pad(weight.reshape(-1), (0, -weight.numel() % INT4_GROUP_ELEMENTS))
    groups = flat.view(-1, INT4_GROUP_ELEMENTS).to(torch.float32)
    least, largest = groups.amin(dim=1), groups.amax(dim=1)
    # Rounded to fp16 first, so that packing and unpacking use the same numbers.
    scales = torch.stack((largest.sub(least).div_(_INT4_MAX), least)).to(torch.float16)
    steps, starts = scales.to(torch.float32).unsqueeze(-1)
    divisors = torch.where(steps == 0, torch.ones_like(steps), steps)
    values = groups.sub_(starts).div_(divisors).round_().clamp_(0, _INT4_MAX).to(torch.uint8)
    # The first half of a group in the low bits, the second in the high ones.
    low, high = values.chunk(2, dim=1)
    return high.bitwise_left_shift(4).bitwise_or_(low).view(-1), scales


def _unpack_int4(packed: torch.Tensor, scales: torch.Tensor, form: PackedForm) -> torch.Tensor:
    half = INT4_GROUP_ELEMENTS // 2
    pairs = packed.view(-1, half)
    values = torch.empty((len(pairs), 2, half), dtype=form.dtype, device=packed.device)
    values[:, 0].copy_(pairs.bitwise_and(_INT4_MAX))
    values[:, 1].copy_(pairs.bitwise_right_shift(4))
    steps, starts = scales.unsqueeze(-1)
    groups = values.view(-1, INT4_GROUP_ELEMENTS).mul_(steps).add_(starts)
    return groups.view(-1)[: form.num_elements].view(form.shape)


def _pack_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Padded to whole blocks of one row each: kernels differ in how they treat a matrix with odd sides.
    flat = F.pad(weight.reshape(-1), (0, -weight.numel() % NF4_BLOCK_ELEMENTS))
    packed, scales = _bitsandbytes_ops().quantize_4bit(flat, NF4_BLOCK_ELEMENTS, "nf4", torch.uint8)
    return packed.view(-1), scales


def _bitsandbytes_ops() -> Any:
    load_bitsandbytes(needed_for="frozen weights in nf4")
    return torch.ops.bitsandbytes
