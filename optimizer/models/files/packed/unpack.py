"""Packed matrices of published checkpoints back to fp32: bitsandbytes in 4 and 8 bits, GPTQ, AWQ.

Sources of the layouts: bitsandbytes' ``functional.dequantize_4bit`` and ``int8_vectorwise_dequant``; AutoGPTQ's
``qlinear_cuda_old``; AutoAWQ's ``packing_utils``. All is plain torch, so that no library has to be installed to read a file.
"""

from collections.abc import Callable, Mapping

import torch

from optimizer.base.errors import InvalidModel
from optimizer.models.files.packed.groups import PackedTensor

Read = Callable[[], torch.Tensor]
_INT8_MAX = 127
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, that lies in each four bits of a word, from the lowest."""


def unpack_tensor(tensor: PackedTensor, parts: Mapping[str, Read]) -> torch.Tensor:
    """The matrix in fp32, a new tensor. parts: how each stored part is read, by role."""
    if tensor.packing in ("nf4", "fp4"):
        return _unpack_four_bit(tensor, parts)
    if tensor.packing == "int8":
        scales = parts["scales"]().to(torch.float32).div_(_INT8_MAX)
        return parts["weight"]().to(torch.float32).mul_(scales.unsqueeze(1))
    return _unpack_groups(tensor, parts)


def _unpack_four_bit(tensor: PackedTensor, parts: Mapping[str, Read]) -> torch.Tensor:
    scales = parts["absmax"]()
    if "nested_absmax" in parts:
        values = parts["nested_quant_map"]().to(torch.float32)[scales.to(torch.int64)]
        scales = _times_blocks(values, parts["nested_absmax"](), block_elements=tensor.facts["nested_block_elements"])
        scales.add_(tensor.facts["offset"])
    packed = parts["weight"]().reshape(-1).view(torch.uint8)
    values = parts["quant_map"]().to(torch.float32)
    num_elements = torch.Size(tensor.shape).numel()
    flat = torch.empty((packed.numel(), 2), dtype=torch.float32)
    # the first of two elements lies in the high bits
    flat[:, 0] = values[packed.bitwise_right_shift(4).to(torch.int32)]
    flat[:, 1] = values[packed.bitwise_and(15).to(torch.int32)]
    return _times_blocks(flat.view(-1)[:num_elements], scales, block_elements=tensor.facts["block_elements"]).view(tensor.shape)


def _times_blocks(flat: torch.Tensor, scales: torch.Tensor, *, block_elements: int) -> torch.Tensor:
    """Multiply each block in place by its own scale; the last may be short."""
    num_whole = flat.numel() // block_elements
    whole = flat[: num_whole * block_elements].view(num_whole, block_elements)
    whole.mul_(scales[:num_whole].to(torch.float32).unsqueeze(1))
    if num_whole * block_elements < flat.numel():
        flat[num_whole * block_elements :].mul_(scales[num_whole].to(torch.float32))
    return flat


def _unpack_groups(tensor: PackedTensor, parts: Mapping[str, Read]) -> torch.Tensor:
    bits, scales = tensor.facts["bits"], parts["scales"]().to(torch.float32)
    num_groups, num_inputs = len(scales), tensor.shape[1]
    if tensor.packing == "awq":
        values = _unpack_columns(parts["qweight"](), bits, order=_AWQ_COLUMNS)
        zeros = _unpack_columns(parts["qzeros"](), bits, order=_AWQ_COLUMNS)
    else:
        # rows are packed as columns of the transposed matrix are
        values = _unpack_columns(parts["qweight"]().t().contiguous(), bits).t()
        zeros = _unpack_columns(parts["qzeros"](), bits).add_(int(tensor.facts["adds_one"]))
    if "g_idx" in parts:
        groups = parts["g_idx"]().to(torch.int64)
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise InvalidModel(
                f"tensor {tensor.name}: g_idx names group {int(groups.max())}; allowed: 0 to {num_groups - 1}",
                field=f"weights.{tensor.name}",
            )
    else:
        groups = torch.arange(num_inputs).div_(num_inputs // num_groups, rounding_mode="floor")
    return values.sub(zeros[groups]).mul_(scales[groups]).t().contiguous()


def _unpack_columns(words: torch.Tensor, bits: int, *, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of 32 bits ``[rows, columns / n]`` to fp32 ``[rows, columns]``, the lowest bits first unless ``order`` says where."""
    per_word = 32 // bits
    unpacked = torch.empty((*words.shape, per_word), dtype=torch.float32)
    for place in range(per_word):
        column = place if order is None else order[place]
        unpacked[..., column] = words.bitwise_right_shift(bits * place).bitwise_and(2**bits - 1)
    return unpacked.view(len(words), -1)
