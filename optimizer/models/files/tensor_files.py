"""Writes tensors to safetensors files, one tensor in memory at a time, spread over shards where they are many.

The library's own writer wants all of a file's tensors at once. The format (huggingface/safetensors, README): eight bytes with the
length of a JSON header, the header with each tensor's dtype, shape and place, then the bytes of all, without gaps.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT_BYTES = 8
_PIECE_ELEMENTS = 1 << 20
"""Elements that are converted and written at once, so that a tensor that lies in memory is not copied whole."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the file; what is read is converted."""
    read: Callable[[], torch.Tensor]
    """Called once, when its turn comes. On any device."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(
    entries: Sequence[TensorEntry], *, folder: Path, stem: str = "model", max_shard_bytes: int | None = None
) -> None:
    """Write ``<stem>.safetensors``, or several with ``<stem>.safetensors.index.json`` where they exceed ``max_shard_bytes``.

    A tensor is never cut, so one that is larger than that has a file of its own. The same numbers give the same bytes.
    """
    shards = list(_shard(entries, max_shard_bytes))
    if len(shards) == 1:
        _write_file(folder / f"{stem}.safetensors", shards[0])
        return
    files: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        name = f"{stem}-{index:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        files.update(dict.fromkeys((entry.name for entry in shard), name))
    total_bytes = sum(entry.num_bytes for entry in entries)
    index_document = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index_document, indent=2, sort_keys=True) + "\n")


def _shard(entries: Sequence[TensorEntry], max_shard_bytes: int | None) -> Iterator[list[TensorEntry]]:
    shard: list[TensorEntry] = []
    shard_bytes = 0
    for entry in entries:
        if shard and max_shard_bytes is not None and shard_bytes + entry.num_bytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(entry)
        shard_bytes += entry.num_bytes
    yield shard


def _write_file(path: Path, entries: Sequence[TensorEntry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": _DTYPE_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for entry in entries:
            _write_tensor(file, entry)


def _write_tensor(file: BinaryIO, entry: TensorEntry) -> None:
    tensor = entry.read().detach()
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{entry.name} was read with shape {tuple(tensor.shape)}, not {entry.shape}")
    for piece in torch.split(tensor.reshape(-1), _PIECE_ELEMENTS):
        # A copy: a storage that numpy was shown can never be resized again, and weights that stream must be.
        copied = piece.to(device="cpu", dtype=entry.dtype, copy=True).contiguous()
        file.write(copied.view(torch.uint8).numpy().data)
        del copied
