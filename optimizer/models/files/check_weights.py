"""Checks a folder of uploaded safetensors before any library opens it. Torch-free; reads headers only.

safetensors itself accepts duplicate tensor names, names with path tricks, and headers of 100 MB that take more than 1 GB to
parse; this pre-check does not. Files that may hold pickles are refused by name and by their first bytes: nothing in this
program unpickles what a user sent.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel
from optimizer.base.unique_keys import refuse_duplicates

MAX_HEADER_BYTES = 16 * 10**6
MAX_METADATA_BYTES = 64 * 1024
MAX_INDEX_BYTES = 16 * 10**6
MAX_TENSORS = 50_000
MAX_SHARDS = 1_000
MAX_DIMS = 8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
_PICKLE_SUFFIXES = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".joblib", ".h5", ".gguf"}
)
_FOREIGN_MAGIC: dict[bytes, str] = {
    b"\x80\x02": "a pickle", b"\x80\x03": "a pickle", b"\x80\x04": "a pickle", b"\x80\x05": "a pickle",
    b"PK\x03\x04": "a zip archive or a torch checkpoint", b"GGUF": "a GGUF file", b"\x93NUMPY": "a numpy file",
    b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One tensor as its header declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset_bytes: int = 0
    """Place of its first byte in the file."""


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """Facts from the headers, all checked against the files' sizes."""

    files: tuple[str, ...]
    """Names inside the folder, in order."""
    tensors: tuple[TensorFacts, ...]
    tensor_files: tuple[str, ...]
    """The file of each tensor."""
    num_bytes: int
    """Bytes of all files, headers included."""

    @property
    def num_elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)


def check_weights(folder: str | Path, *, may_link: bool = False) -> WeightsFacts:
    """Check the weights in ``folder``: one ``*.safetensors``, or shards with ``model.safetensors.index.json``.

    may_link: whether files may be links, as those of a model that was linked are; an upload has none.

    Raises InvalidModel that names the file and the tensor. Numbers inside tensors are not read.
    """
    root = Path(folder)
    _refuse_pickles(root)
    found = sorted(path.name for path in root.glob("*.safetensors"))
    index = root / INDEX_FILE
    if index.exists():
        return _check_sharded(root, index, found, may_link=may_link)
    if len(found) != 1:
        raise _invalid(
            "weights",
            f"{len(found)} safetensors files without {INDEX_FILE}",
            allowed=f"one safetensors file, or shards with {INDEX_FILE}",
        )
    tensors = check_file(root / found[0], may_link=may_link)
    return WeightsFacts(
        files=(found[0],),
        tensors=tensors,
        tensor_files=(found[0],) * len(tensors),
        num_bytes=(root / found[0]).stat().st_size,
    )


def check_file(path: str | Path, *, may_link: bool = False) -> tuple[TensorFacts, ...]:
    """Check one safetensors file's header against its size; the tensors in the order of their bytes."""
    path = Path(path)
    if (path.is_symlink() and not may_link) or not path.is_file():
        raise _invalid(path.name, "not a plain file", allowed="a plain file")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        for magic, kind in _FOREIGN_MAGIC.items():
            if start.startswith(magic) and not _is_header_size(start, size_bytes):
                raise _invalid(path.name, f"{kind} under a safetensors name", allowed="safetensors")
        if len(start) < 8:
            raise _invalid(path.name, f"{size_bytes} bytes long", allowed="at least 8 bytes")
        header_bytes = int.from_bytes(start, "little")
        if not _is_header_size(start, size_bytes):
            raise _invalid(
                path.name,
                f"a header of {header_bytes:,} bytes in a file of {size_bytes:,}",
                allowed=f"2 to {MAX_HEADER_BYTES:,} bytes, and inside the file",
            )
        header = _parse_json(file.read(header_bytes), where=path.name)
    return _check_header(header, header_bytes=header_bytes, data_bytes=size_bytes - 8 - header_bytes, where=path.name)


def _is_header_size(start: bytes, size_bytes: int) -> bool:
    return len(start) == 8 and 2 <= int.from_bytes(start, "little") <= min(MAX_HEADER_BYTES, size_bytes - 8)


def _refuse_pickles(root: Path) -> None:
    for path in sorted(root.iterdir()):
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            raise _invalid(path.name, "a format that may run code when read", allowed="safetensors only")


def _check_sharded(root: Path, index: Path, found: Sequence[str], *, may_link: bool) -> WeightsFacts:
    weight_map = read_index(index, may_link=may_link)
    named = sorted(set(weight_map.values()))
    if len(named) > MAX_SHARDS:
        raise _invalid(INDEX_FILE, f"{len(named):,} shards", allowed=f"at most {MAX_SHARDS:,}")
    absent = [name for name in named if name not in found]
    if absent:
        raise _invalid(
            INDEX_FILE, f"names {absent[0]}, which is not there", allowed=f"the files {', '.join(found[:5])}"
        )
    extra = [name for name in found if name not in named]
    if extra:
        raise _invalid(INDEX_FILE, f"does not name {extra[0]}, which is there", allowed="every safetensors file named")
    located: dict[str, str] = {}
    tensors: list[TensorFacts] = []
    for name in named:
        for tensor in check_file(root / name, may_link=may_link):
            if tensor.name in located:
                raise _invalid(
                    name, f"tensor {tensor.name} is also in {located[tensor.name]}", allowed="each tensor once"
                )
            located[tensor.name] = name
            tensors.append(tensor)
    if len(tensors) > MAX_TENSORS:
        raise _invalid(INDEX_FILE, f"{len(tensors):,} tensors", allowed=f"at most {MAX_TENSORS:,}")
    for tensor_name in sorted(set(located) | set(weight_map)):
        if located.get(tensor_name) != weight_map.get(tensor_name):
            raise _invalid(
                INDEX_FILE,
                f"places {tensor_name} in {weight_map.get(tensor_name)}, it is in {located.get(tensor_name)}",
                allowed="the file that holds it",
            )
    return WeightsFacts(
        files=tuple(named),
        tensors=tuple(tensors),
        tensor_files=tuple(located[tensor.name] for tensor in tensors),
        num_bytes=sum((root / name).stat().st_size for name in named),
    )


def read_index(index: Path, *, may_link: bool = False) -> dict[str, str]:
    """The file of each tensor, by ``model.safetensors.index.json``; all are plain names. Raises InvalidModel."""
    if (index.is_symlink() and not may_link) or index.stat().st_size > MAX_INDEX_BYTES:
        raise _invalid(INDEX_FILE, "a link, or too large", allowed=f"a plain file of at most {MAX_INDEX_BYTES:,} bytes")
    document = _parse_json(index.read_bytes(), where=INDEX_FILE)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _invalid(INDEX_FILE, "no weight_map", allowed="an object from tensor names to file names")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or _SHARD_NAME.fullmatch(file) is None:
            raise _invalid(
                INDEX_FILE, f"places {tensor[:80]!r} in {file!r:.80}", allowed="a plain *.safetensors file name"
            )
    return weight_map


def _parse_json(data: bytes, *, where: str) -> dict[str, Any]:
    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=refuse_duplicates, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"not the JSON of a safetensors header ({error})", allowed="strict JSON") from error
    if not isinstance(document, dict):
        raise _invalid(where, "not a JSON object", allowed="a JSON object")
    return document


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_header(
    header: dict[str, Any], *, header_bytes: int, data_bytes: int, where: str
) -> tuple[TensorFacts, ...]:
    metadata = header.pop("__metadata__", {})
    _check_metadata(metadata, where=where)
    if not 1 <= len(header) <= MAX_TENSORS:
        raise _invalid(where, f"{len(header):,} tensors", allowed=f"1 to {MAX_TENSORS:,}")
    entries = [(_check_tensor(name, entry, where=where)) for name, entry in header.items()]
    entries.sort(key=lambda entry: entry[1:])
    position = 0
    for tensor, begin, end in entries:
        if begin != position:
            raise _invalid(
                where, f"tensor {tensor.name} begins at {begin:,}", allowed=f"{position:,}, without gap or overlap"
            )
        position = end
    if position != data_bytes:
        raise _invalid(where, f"{data_bytes:,} bytes of data", allowed=f"{position:,}, as the header says")
    return tuple(replace(tensor, offset_bytes=8 + header_bytes + begin) for tensor, begin, _ in entries)


def _check_metadata(metadata: Any, *, where: str) -> None:
    is_text = isinstance(metadata, dict) and all(
        isinstance(value, str) and _is_utf8(key) and _is_utf8(value) for key, value in metadata.items()
    )
    if not is_text or len(json.dumps(metadata)) > MAX_METADATA_BYTES:
        raise _invalid(where, "unusable __metadata__", allowed=f"text values, at most {MAX_METADATA_BYTES:,} bytes")


def _is_utf8(text: str) -> bool:
    """False for half a surrogate pair, which Python's JSON reads and safetensors' does not."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _check_tensor(name: str, entry: Any, *, where: str) -> tuple[TensorFacts, int, int]:
    if _TENSOR_NAME.fullmatch(name) is None:
        raise _invalid(where, f"a tensor named {name[:80]!r}", allowed="1 to 256 letters, digits, '_', '.' and '-'")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _invalid(where, f"tensor {name} has other keys", allowed="dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise _invalid(where, f"tensor {name} has dtype {dtype!r:.40}", allowed=", ".join(_DTYPE_BYTES))
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise _invalid(where, f"tensor {name} has shape {shape!r:.80}", allowed=f"at most {MAX_DIMS} whole numbers")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(where, f"tensor {name} has data_offsets {offsets!r:.80}", allowed="[begin, end]")
    num_bytes = prod(shape) * _DTYPE_BYTES[dtype]
    if num_bytes != offsets[1] - offsets[0]:
        raise _invalid(
            where,
            f"tensor {name} spans {offsets[1] - offsets[0]:,} bytes",
            allowed=f"{num_bytes:,} by its shape and dtype",
        )
    return TensorFacts(name=name, dtype=dtype, shape=tuple(shape), num_bytes=num_bytes), offsets[0], offsets[1]


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _invalid(where: str, found: str, *, allowed: str) -> InvalidModel:
    message = f"weights file {where}: {found}; allowed: {allowed}"
    return InvalidModel(message, field=f"weights.{where}", value=found, allowed=allowed)
