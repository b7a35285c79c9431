"""Reads tensors of a GGUF file one by one in fp32, undoing what the conversion to GGUF changed. Torch-free.

Llama's query and key matrices lie there with their rows in another order, Gemma's norms with one added (llama.cpp's
``convert_hf_to_gguf.py``: ``LlamaModel.permute``, ``GemmaModel.modify_tensors``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.base.errors import InvalidModel
from optimizer.models.files.packed.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from optimizer.models.files.packed.gguf_names import GgufModel, read_gguf_model

Array = np.ndarray[Any, Any]
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class GgufReader:
    """One tensor under transformers' name."""

    name: str
    shape: tuple[int, ...]
    packing: str
    num_bytes: int
    read: Callable[[], Array]
    """A new array in fp32."""


def read_gguf(file: str | Path) -> tuple[GgufHeader, GgufModel]:
    """Header, config and names. Raises InvalidModel."""
    header = read_gguf_header(file)
    factors = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FACTORS), None)
    return header, read_gguf_model(header, _read(file, factors) if factors is not None else None)


def gguf_readers(file: str | Path) -> list[GgufReader]:
    """One for each tensor of the model, in the order of the file. Raises InvalidModel."""
    header, model = read_gguf(file)
    return [
        GgufReader(
            name=model.names[tensor.name],
            shape=tensor.shape,
            packing=tensor.packing,
            num_bytes=tensor.num_bytes,
            read=partial(_read_as_published, file, tensor, model),
        )
        for tensor in header.tensors
        if tensor.name in model.names
    ]


def _read_as_published(file: str | Path, tensor: GgufTensor, model: GgufModel) -> Array:
    values, kind = _read(file, tensor), model.config["model_type"]
    if kind in ("llama", "mistral") and ".attn_q." in tensor.name:
        return _unpermuted(values, model.config["num_attention_heads"])
    if kind in ("llama", "mistral") and ".attn_k." in tensor.name:
        return _unpermuted(values, model.config["num_key_value_heads"])
    if kind.startswith("gemma") and tensor.name.endswith("norm.weight"):
        values -= 1
    return values


def _read(file: str | Path, tensor: GgufTensor) -> Array:
    """The numbers in fp32, by whatever type they are stored."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with Path(file).open("rb") as stream:
        stream.seek(tensor.offset_bytes)
        data = stream.read(tensor.num_bytes)
    if tensor.packing in _PLAIN:
        return np.frombuffer(data, dtype=_PLAIN[tensor.packing]).astype(np.float32).reshape(tensor.shape)
    rows = np.frombuffer(data, dtype=np.uint8).reshape((*tensor.shape[:-1], -1))
    try:
        values: Array = dequantize(rows, GGMLQuantizationType[tensor.packing])
    except NotImplementedError as error:
        raise InvalidModel(
            f"tensor {tensor.name} is stored as {tensor.packing}, which cannot be read",
            field=f"weights.{tensor.name}",
            value=tensor.packing,
            allowed="F32, F16, BF16, Q8_0 and the other types that the gguf package unpacks",
        ) from error
    return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def _unpermuted(values: Array, num_heads: int) -> Array:
    """Rows of each head back from pairs side by side to halves one after the other."""
    rows = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
