"""Reads the header of a GGUF file, strictly: metadata and where each tensor lies. Torch-free; no tensor is read.

The format: ggml's ``docs/gguf.md``, versions 2 and 3, little-endian. Sizes of packed blocks are the ``gguf`` package's.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from optimizer.base.errors import InvalidModel

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 * 10**6
"""Vocabularies are part of it."""
MAX_ENTRIES = 100_000
MAX_ITEMS = 4_000_000
"""Items of one array of metadata."""
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor as the header declares it."""

    name: str
    shape: tuple[int, ...]
    """Outermost axis first, as torch has it; the file writes it the other way round."""
    packing: str
    """Name of its ggml type, such as ``F16`` or ``Q8_0``."""
    offset_bytes: int
    """Place of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Everything before the tensors' bytes."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(file: str | Path) -> GgufHeader:
    """Raises InvalidModel that names the part of the file that is wrong."""
    path = Path(file)
    with path.open("rb") as stream:
        reader = _Reader(stream, name=path.name)
        if reader.take(4) != MAGIC:
            raise reader.refusal("no GGUF file", allowed="a file that begins with GGUF")
        version = reader.number("I")
        if version not in (2, 3):
            raise reader.refusal(f"version {version}", allowed="version 2 or 3, little-endian")
        num_tensors, num_entries = reader.count(MAX_ENTRIES), reader.count(MAX_ENTRIES)
        metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(num_entries)}
        declared = [_read_tensor(reader) for _ in range(num_tensors)]
        end_bytes = stream.tell()
    return GgufHeader(metadata=metadata, tensors=_place(path, declared, metadata, header_bytes=end_bytes))


def _read_tensor(reader: "_Reader") -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of its type, offset among the tensors."""
    name, num_axes = reader.text(), reader.number("I")
    if not 1 <= num_axes <= 4:
        raise reader.refusal(f"tensor {name[:80]!r} has {num_axes} axes", allowed="1 to 4")
    shape = tuple(reader.number("Q") for _ in range(num_axes))[::-1]
    return name, shape, reader.number("I"), reader.number("Q")


def _place(
    path: Path, declared: list[tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, Any], *, header_bytes: int
) -> tuple[GgufTensor, ...]:
    """Check each tensor against the file's size. Raises InvalidModel."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 65536:
        raise _invalid(path.name, f"general.alignment {alignment!r:.40}", allowed="1 to 65536")
    data_bytes = header_bytes + -header_bytes % alignment
    size_bytes = path.stat().st_size
    tensors, names = [], set()
    for name, shape, number, offset_bytes in declared:
        packing = _packing_name(number)
        if packing is None or name in names:
            raise _invalid(path.name, f"tensor {name[:80]!r} twice or of type {number}", allowed="each once, of a known type")
        names.add(name)
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[packing]]
        if shape[-1] % block_elements:
            raise _invalid(path.name, f"tensor {name} of shape {shape}", allowed=f"rows of a multiple of {block_elements}")
        num_bytes = prod(shape) // block_elements * block_bytes
        if data_bytes + offset_bytes + num_bytes > size_bytes:
            found = f"{size_bytes:,} bytes, tensor {name} ends at {data_bytes + offset_bytes + num_bytes:,}"
            raise _invalid(path.name, found, allowed="a whole file; it seems to be cut short")
        place = data_bytes + offset_bytes
        tensors.append(GgufTensor(name=name, shape=shape, packing=packing, offset_bytes=place, num_bytes=num_bytes))
    return tuple(sorted(tensors, key=lambda tensor: tensor.offset_bytes))


def _packing_name(number: int) -> str | None:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return None


class _Reader:
    """Takes numbers and texts from the beginning of a file, and refuses to take more than a header may hold."""

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self._stream = stream
        self._name = name
        self._num_bytes = 0

    def take(self, num_bytes: int) -> bytes:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_HEADER_BYTES:
            raise self.refusal("a header that is too long", allowed=f"at most {MAX_HEADER_BYTES:,} bytes")
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise self.refusal("a header that ends early", allowed="a whole file")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, limit: int) -> int:
        found: int = self.number("Q")
        if found > limit:
            raise self.refusal(f"a list of {found:,}", allowed=f"at most {limit:,}")
        return found

    def text(self) -> str:
        return self.take(self.count(MAX_HEADER_BYTES)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._form(kind))
        kind, num_items = self.number("I"), self.count(MAX_ITEMS)
        if kind == _STRING:
            return [self.text() for _ in range(num_items)]
        form = f"{num_items}{self._form(kind)}"
        return list(struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"))))

    def _form(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self.refusal(f"a value of kind {kind}", allowed="the kinds of GGUF version 3, no lists of lists")
        return _NUMBERS[kind]

    def refusal(self, found: str, *, allowed: str) -> InvalidModel:
        return _invalid(self._name, found, allowed=allowed)


def _invalid(name: str, found: str, *, allowed: str) -> InvalidModel:
    message = f"weights file {name}: {found}; allowed: {allowed}"
    return InvalidModel(message, field=f"weights.{name}", value=found, allowed=allowed)
