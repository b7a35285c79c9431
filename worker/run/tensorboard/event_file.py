"""TensorBoard's event file, written without TensorBoard: scalars by step in TFRecord frames. Torch-free.

The format: a frame is the length of its payload (8 bytes, little-endian), the masked CRC-32C of those 8 bytes (4), the payload
and its masked CRC-32C (4); see tensorflow/core/lib/io/record_writer.cc. A payload is one ``Event`` in protobuf's wire format, as
in tensorflow/core/util/event.proto: ``wall_time`` = 1 (double), ``step`` = 2 (varint), ``file_version`` = 3 (string, of the first
event), ``summary`` = 5; a ``Summary`` repeats ``value`` = 1 with ``tag`` = 1 (string) and ``simple_value`` = 2 (float). The
tensorboard package would bring protobuf, grpc and a web server for these two messages.
"""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from worker.mirrors.scalars import Scalars

FILE_VERSION = "brain.Event:2"
FILE_NAME_START = "events.out.tfevents."
"""TensorBoard takes files whose names hold ``tfevents``."""
_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reversed."""
_MASK_DELTA = 0xA282EAD8


def write_event_file(file: Path, events: Iterable[Scalars]) -> int:
    """Whole or not at all; the number of events beside the first, which says the format's version."""
    partial = file.with_name(f".{file.name}.part")
    num_events = 0
    with partial.open("wb") as out:
        for wall_time_s, step, scalars in events:
            if not num_events:
                out.write(frame(_double(1, wall_time_s) + _bytes(3, FILE_VERSION.encode())))
            out.write(frame(encode_event(wall_time_s, step, scalars)))
            num_events += 1
    partial.replace(file)
    return num_events


def encode_event(wall_time_s: float, step: int, scalars: Mapping[str, float]) -> bytes:
    values = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars.items())
    return _double(1, wall_time_s) + _key(2, 0) + _varint(step) + _bytes(5, values)


def frame(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc32c(length)) + payload + struct.pack("<I", masked_crc32c(payload))


def masked_crc32c(data: bytes) -> int:
    """Rotated and shifted, since a CRC over data that holds CRCs says little."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _make_table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _make_table()


def _key(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def _varint(value: int) -> bytes:
    """Encode a number from 0 as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _key(field, 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value
