"""A model's tensors as GGUF holds them: other names, Llama's query and key rows in another order, Gemma's norms one higher.

Matrices are F16 or Q8_0, in blocks of 32 along a row; vectors stay fp32, and so does a matrix whose rows are no whole
blocks as F16. Read and converted a piece at a time. Sources: ``gguf-py/gguf/tensor_mapping.py``; ``convert_hf_to_gguf.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from optimizer.models.files.gguf_export.hyperparameters import rope_factors
from optimizer.models.files.gguf_export.kinds import ARCHITECTURES, GgufPacking
from optimizer.models.files.tensor_files import TensorEntry
from optimizer.models.spec import ModelSpec

PIECE_ELEMENTS = 1 << 20
Q8_BLOCK_ELEMENTS = 32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class GgufEntry:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    """Outermost axis first, as torch has it."""
    type_name: str
    """F32, F16 or Q8_0."""
    read: Callable[[], torch.Tensor]
    """The numbers in the order of the file, in any float dtype."""

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape))

    @property
    def num_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        return int(np.prod(self.shape)) // block_elements * block_bytes

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of its bytes, as the gguf package wants packed tensors described."""
        rows = int(np.prod(self.shape[:-1]))
        return (*self.shape[:-1], self.num_bytes // rows)


def list_entries(tensors: Sequence[TensorEntry], spec: ModelSpec, *, packing: GgufPacking) -> list[GgufEntry]:
    """tensors: of the whole model, under transformers' names. Raises ValueError for one that GGUF has no name for."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    architecture = ARCHITECTURES[spec.model_type]
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], spec.num_blocks)
    entries = []
    for tensor in tensors:
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"GGUF has no name for {tensor.name} of {spec.model_type}")
        read = partial(_read, tensor, num_heads=_num_heads(tensor.name, spec), adds_one=_adds_one(tensor.name, architecture))
        entries.append(GgufEntry(name=name, shape=tensor.shape, type_name=_type(tensor.shape, packing), read=read))
    factors = rope_factors(spec)
    if factors is not None:
        read_factors = partial(torch.from_numpy, factors)
        entries.append(GgufEntry(name="rope_freqs.weight", shape=factors.shape, type_name="F32", read=read_factors))
    return entries


def number_pieces(entry: GgufEntry) -> Iterator[Array]:
    """The numbers of a tensor in fp32, in the order of the file, a piece at a time; of Q8_0 in rows of one block."""
    tensor = entry.read().detach()
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{entry.name} was read with shape {tuple(tensor.shape)}, not {entry.shape}")
    for piece in torch.split(tensor.reshape(-1), PIECE_ELEMENTS):
        numbers = piece.to(device="cpu", dtype=torch.float32, copy=True).numpy()
        yield numbers.reshape(-1, Q8_BLOCK_ELEMENTS) if entry.type_name == "Q8_0" else numbers


def pack_piece(numbers: Array, entry: GgufEntry) -> Array:
    """The bytes of a piece as the file holds them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed: Array = quantize(numbers, GGMLQuantizationType[entry.type_name])
    return packed


def _read(tensor: TensorEntry, *, num_heads: int, adds_one: bool) -> torch.Tensor:
    numbers = tensor.read().detach()
    if num_heads:
        halves = numbers.reshape(num_heads, 2, numbers.shape[0] // num_heads // 2, *numbers.shape[1:])
        return halves.swapaxes(1, 2).reshape(numbers.shape)
    return numbers.to(torch.float32) + 1 if adds_one else numbers


def _num_heads(name: str, spec: ModelSpec) -> int:
    """Number of heads whose rows are put pair by pair; 0 where they stay."""
    if ARCHITECTURES[spec.model_type] != "llama":
        return 0
    if ".q_proj." in name:
        return int(spec.config["num_attention_heads"])
    return int(spec.config["num_key_value_heads"]) if ".k_proj." in name else 0


def _adds_one(name: str, architecture: str) -> bool:
    return architecture.startswith("gemma") and name.endswith("norm.weight")


def _type(shape: tuple[int, ...], packing: GgufPacking) -> str:
    if len(shape) == 1:
        return "F32"
    return "Q8_0" if packing == "q8_0" and shape[-1] % Q8_BLOCK_ELEMENTS == 0 else "F16"
