"""Every tensor of a model's folder by its name, read when asked: plain safetensors, packed ones unpacked, GGUF.

Names are those that transformers' files use (``load.py`` places them). One tensor is in memory at a time: a plain one is read
straight into its own memory, a packed one has its packed bytes beside it for a moment.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer.formats.shared_blocks import Slice
from optimizer.models.files.check_weights import TensorFacts, check_weights
from optimizer.models.files.packed.gguf_names import find_gguf
from optimizer.models.files.packed.gguf_read import gguf_readers
from optimizer.models.files.packed.groups import PackedTensor, group_tensors
from optimizer.models.files.packed.quantization import read_quantization
from optimizer.models.files.packed.unpack import unpack_tensor

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorReader:
    """One tensor that can be read, as often as wanted."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of what ``read`` returns: the file's own, fp32 where it was packed."""
    file: str
    """Name inside the folder of the file that holds it, or most of it."""
    num_bytes: int
    """Bytes read from the disk."""
    packing: str
    """``plain``, or the format that it is unpacked from, such as ``nf4``, ``gptq`` or ``Q8_0``."""
    read: Callable[[], torch.Tensor]
    """A new tensor on the CPU."""
    read_slice: Callable[[Slice, int, int], torch.Tensor] | None = None
    """A rank's slice of it among so many, without the rest; None where the whole has to be read."""
    read_into: Callable[[torch.Tensor], None] | None = None
    """Reads it over a contiguous tensor of its shape and dtype; None where it has to be unpacked."""


def tensor_readers(folder: str | Path) -> list[TensorReader]:
    """One reader for each tensor of the model, in the order in which they lie in the files, file by file.

    Reads headers and, of packed files, their few bytes on shapes. Raises InvalidModel that names the file and the tensor.
    """
    root = Path(folder)
    gguf_file = find_gguf(root)
    if gguf_file is not None:
        return [
            TensorReader(
                name=tensor.name,
                shape=tensor.shape,
                dtype=torch.float32,
                file=gguf_file.name,
                num_bytes=tensor.num_bytes,
                packing=tensor.packing,
                read=partial(_from_numpy, tensor.read),
            )
            for tensor in gguf_readers(gguf_file)
        ]
    facts = check_weights(root, may_link=True)
    located = dict(zip((tensor.name for tensor in facts.tensors), facts.tensor_files, strict=True))
    stored = {tensor.name: tensor for tensor in facts.tensors}
    read_stored = {name: partial(read_tensor, root / located[name], tensor) for name, tensor in stored.items()}
    grouped = group_tensors(stored, quantization=read_quantization(root), read_json=partial(_read_json, read_stored))
    return [_reader(each, stored, located, read_stored, root=root) for each in grouped]


def read_tensor(file: str | Path, facts: TensorFacts) -> torch.Tensor:
    """A tensor of a safetensors file, read into memory of its own."""
    data = torch.empty(facts.num_bytes, dtype=torch.uint8)
    _read_over(file, facts, data)
    return data.view(_DTYPES[facts.dtype]).reshape(facts.shape)


def _read_over(file: str | Path, facts: TensorFacts, target: torch.Tensor) -> None:
    """Read a tensor of a safetensors file over a contiguous one of as many bytes."""
    with Path(file).open("rb") as stream:
        stream.seek(facts.offset_bytes)
        num_bytes = stream.readinto(target.view(-1).view(torch.uint8).numpy().data) if facts.num_bytes else 0
    if num_bytes != facts.num_bytes:
        raise EOFError(f"{file} ended {facts.num_bytes - num_bytes:,} bytes before the end of {facts.name}")


def read_tensor_slice(file: str | Path, facts: TensorFacts, slice_: Slice, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's slice of a tensor of a safetensors file, of one or two dimensions, read into memory of its own."""
    pieces, dtype = slice_.pieces_of(rank, num_ranks), _DTYPES[facts.dtype]
    shape = list(facts.shape)
    shape[slice_.dim] = sum(size for _, size in pieces)
    data = torch.empty(shape, dtype=dtype)
    stored = np.memmap(file, dtype=np.uint8, mode="r", offset=facts.offset_bytes, shape=(facts.num_bytes,))
    rows = stored.reshape(*facts.shape[: slice_.dim], facts.shape[slice_.dim], -1)
    place, start = data.view(torch.uint8).numpy().reshape(*shape[: slice_.dim], shape[slice_.dim], -1), 0
    for first, size in pieces:
        ahead = (slice(None),) * slice_.dim
        place[(*ahead, slice(start, start + size))] = rows[(*ahead, slice(first, first + size))]
        start += size
    return data


def _reader(
    tensor: PackedTensor,
    stored: Mapping[str, TensorFacts],
    located: Mapping[str, str],
    read_stored: Mapping[str, Callable[[], torch.Tensor]],
    *,
    root: Path,
) -> TensorReader:
    first = next(iter(tensor.parts.values()))
    parts = {role: read_stored[name] for role, name in tensor.parts.items()}
    is_plain = tensor.packing == "plain"
    facts = stored[first]
    return TensorReader(
        name=tensor.name,
        shape=tensor.shape,
        dtype=_DTYPES[stored[first].dtype] if is_plain else torch.float32,
        file=located[first],
        num_bytes=sum(stored[name].num_bytes for name in tensor.parts.values()),
        packing=tensor.packing,
        read=read_stored[first] if is_plain else partial(unpack_tensor, tensor, parts),
        read_slice=partial(read_tensor_slice, root / located[first], facts) if is_plain else None,
        read_into=partial(_read_over, root / located[first], facts) if is_plain else None,
    )


def _read_json(read_stored: Mapping[str, Callable[[], torch.Tensor]], name: str) -> Any:
    """The document that bitsandbytes keeps as the bytes of a tensor."""
    return json.loads(bytes(read_stored[name]().numpy()).decode())


def _from_numpy(read: Callable[[], Any]) -> torch.Tensor:
    return torch.from_numpy(read())
