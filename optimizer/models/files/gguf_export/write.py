"""Writes a trained model as one GGUF file, a piece of a tensor in memory at a time. The disk is asked first."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.base.errors import DiskFull, MissingExtra
from optimizer.base.units import MIB, format_bytes
from optimizer.models.files.gguf_export.hyperparameters import add_hyperparameters
from optimizer.models.files.gguf_export.kinds import ARCHITECTURES, GgufPacking
from optimizer.models.files.gguf_export.tensors import GgufEntry, number_pieces, pack_piece
from optimizer.models.files.gguf_export.vocabulary import Vocabulary, add_vocabulary
from optimizer.models.spec import ModelSpec

_SPARE_BYTES = 64 * MIB
"""For the vocabulary, and what else is written meanwhile."""


def write_gguf(
    file: Path, entries: Sequence[GgufEntry], spec: ModelSpec, *, vocabulary: Vocabulary, packing: GgufPacking, name: str
) -> None:
    """Write ``file``, which is not there yet. Raises DiskFull before anything is written, MissingExtra."""
    needed_bytes = sum(entry.num_bytes for entry in entries) + _SPARE_BYTES
    free_bytes = shutil.disk_usage(file.parent).free
    if free_bytes < needed_bytes:
        raise DiskFull(
            f"the GGUF file needs {format_bytes(needed_bytes)} of disk; {format_bytes(free_bytes)} are free",
            hint="Free disk space; the checkpoint stays, and can be exported again.",
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
        )
    writer = _open_writer(file, spec)
    add_hyperparameters(writer, spec, name=name, packing=packing, architecture=ARCHITECTURES[spec.model_type])
    add_vocabulary(writer, vocabulary)
    for entry in entries:
        _describe(writer, entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        stream = writer.fout[0]
        writer.write_padding(stream, stream.tell())
        for entry in entries:
            for numbers in number_pieces(entry):
                stream.write(pack_piece(numbers, entry).data)
            writer.write_padding(stream, entry.num_bytes)
    finally:
        writer.close()


def _open_writer(file: Path, spec: ModelSpec) -> Any:
    try:
        from gguf import GGUFWriter
    except ImportError as error:
        raise MissingExtra("gguf", needed_for="writing GGUF files") from error
    return GGUFWriter(file, ARCHITECTURES[spec.model_type])


def _describe(writer: Any, entry: GgufEntry) -> None:
    from gguf import GGMLQuantizationType

    is_packed = entry.type_name == "Q8_0"
    writer.add_tensor_info(
        entry.name,
        entry.byte_shape if is_packed else entry.shape,
        np.dtype(np.uint8 if is_packed else np.float32),
        entry.num_bytes,
        raw_dtype=GGMLQuantizationType[entry.type_name],
    )
