"""Reads a written GGUF file with the ``gguf`` package and compares every tensor with what it was made of.

Bounds are the formats': F16 is fp16's own rounding, to the bit; a number of Q8_0 is off by at most half a step, the step
being the block's largest over 127, and by what fp16 rounds off the step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.base.errors import ExportInvalid
from optimizer.models.files.gguf_export.tensors import Q8_BLOCK_ELEMENTS, GgufEntry, number_pieces

_STEPS = 127
_FP16_STEP = 2.0**-11
_FP16_LEAST = 2.0**-25
Array = np.ndarray[Any, Any]


def check_gguf_file(file: Path, entries: Sequence[GgufEntry]) -> float:
    """Report the largest share of a bound that was used, 0 to 1. Raises ExportInvalid that names the tensor."""
    from gguf import GGUFReader

    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    if found.keys() != {entry.name for entry in entries}:
        raise ExportInvalid(f"{file.name} holds {len(found)} tensors; {len(entries)} were written", file=file.name)
    return max((_compare(file, entry, found[entry.name]) for entry in entries), default=0.0)


def _compare(file: Path, entry: GgufEntry, tensor: Any) -> float:
    if tensor.tensor_type.name != entry.type_name or tuple(reversed(tensor.shape.tolist())) != entry.shape:
        raise ExportInvalid(f"{file.name}: {entry.name} is not {entry.type_name} of shape {list(entry.shape)}", file=file.name)
    data = tensor.data.reshape(-1).view(np.uint8)
    start, used = 0, 0.0
    for numbers in number_pieces(entry):
        num_bytes = numbers.size * entry.num_bytes // entry.num_elements
        stored = data[start : start + num_bytes]
        start += num_bytes
        used = max(used, _used_of_bound(stored, numbers, entry.type_name))
    if start != data.nbytes or not used <= 1.0:
        raise ExportInvalid(
            f"{file.name}: {entry.name} differs from what was trained by {used:.3g} times what {entry.type_name} may round",
            file=file.name,
            tensor=entry.name,
        )
    return used


def _used_of_bound(stored: Array, numbers: Array, type_name: str) -> float:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if type_name != "Q8_0":
        kept = stored.view(np.float16 if type_name == "F16" else np.float32)
        return 0.0 if np.array_equal(kept, numbers.astype(kept.dtype)) else float("inf")
    assert numbers.shape[1] == Q8_BLOCK_ELEMENTS
    kept = dequantize(stored.reshape(len(numbers), -1), GGMLQuantizationType.Q8_0)
    largest = np.abs(numbers).max(axis=1, keepdims=True)
    bound = largest * (0.5 / _STEPS + _FP16_STEP) + _STEPS * _FP16_LEAST
    return float((np.abs(kept - numbers) / (bound * (1 + 1e-6))).max())
