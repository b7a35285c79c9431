"""The event file: read back by a decoder of its own, checksums held to published ones.

TensorBoard 2.x itself was seen to read such a file; it is no dependency.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.run.tensorboard.event_file import crc32c, frame, masked_crc32c, write_event_file
from worker.run.tensorboard.leave import leave_event_file


def read_frames(data: bytes) -> Iterator[bytes]:
    """Payloads, each checksum compared."""
    while data:
        [length] = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        payload, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4]) == (masked_crc32c(payload),)
        data = data[4:]
        yield payload


def read_varint(data: bytes) -> tuple[int, bytes]:
    value = shift = 0
    for index, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, data[index + 1 :]
    raise AssertionError("a varint without end")


def read_message(data: bytes) -> list[tuple[int, Any]]:
    """Protobuf's wire format: ``[(field, value)]``."""
    fields = []
    value: Any
    while data:
        key, data = read_varint(data)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, data = read_varint(data)
        elif wire_type == 1:
            value, data = struct.unpack("<d", data[:8])[0], data[8:]
        elif wire_type == 5:
            value, data = struct.unpack("<f", data[:4])[0], data[4:]
        else:
            length, data = read_varint(data)
            value, data = data[:length], data[length:]
        fields.append((field, value))
    return fields


def read_events(file: Path) -> list[tuple[float, int, dict[str, Any]]]:
    """``(wall time, step, {tag: value})`` of each event after the first."""
    first, *rest = [dict(read_message(payload)) for payload in read_frames(file.read_bytes())]
    assert first[3] == b"brain.Event:2"
    events = []
    for event in rest:
        values = [dict(read_message(value)) for field, value in read_message(event[5]) if field == 1]
        events.append((event[1], event[2], {value[1].decode(): value[2] for value in values}))
    return events


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (b"", 0)],
)
def test_checksums_are_those_of_rfc_3720(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


def test_a_frame_is_as_tensorflow_writes_it() -> None:
    assert frame(b"") == bytes(8) + struct.pack("<I", masked_crc32c(bytes(8))) + struct.pack("<I", 0xA282EAD8)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    events = [(1.5e9, 1, {"loss/training": 2.5}), (1.5e9 + 1, 300, {"loss/training": 0.25, "speed/step_ms": 8.0})]
    assert write_event_file(tmp_path / "events", events) == 2
    assert read_events(tmp_path / "events") == events


def record(step: int, *, kind: str = "step", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": 1, "step": step, "time_s": 100.0 + step, **more}


def write_samples(job_folder: Path, attempt: int, records: list[dict[str, Any]], *, torn: str = "") -> Path:
    folder = job_folder / "attempts" / str(attempt)
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + torn)
    return folder


def test_a_job_leaves_all_its_attempts_the_later_one_where_two_measured_a_step(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [record(1, loss=4.0), record(2, loss=3.5), record(3, loss=9.0)], torn='{"kind": "st')
    folder = write_samples(
        tmp_path,
        2,
        [
            record(3, loss=3.0, device_bytes={"weights": 1024}, device_peak_bytes=2048),
            record(3, kind="eval", validation_loss=3.25),
            record(3, kind="timeline", points=[]),
            record(4, loss=float("nan"), tokens_per_s=8.0),
        ],
    )
    [artifact] = leave_event_file(folder, attempt_number=2, fence=5)
    file = tmp_path / artifact["file"]
    assert artifact["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert artifact["num_bytes"] == file.stat().st_size
    assert "tfevents" in artifact["name"]
    assert read_events(file) == [
        (101.0, 1, {"loss/training": 4.0}),
        (102.0, 2, {"loss/training": 3.5}),
        (103.0, 3, {"loss/training": 3.0, "memory/device_peak_bytes": 2048.0, "memory/weights_bytes": 1024.0}),
        (103.0, 3, {"loss/validation": 3.25}),
        (104.0, 4, {"speed/tokens_per_s": 8.0}),
    ]


def test_a_later_attempt_leaves_the_earlier_one_s_file_until_its_own_is_recorded(tmp_path: Path) -> None:
    [earlier] = leave_event_file(write_samples(tmp_path, 1, [record(1, loss=4.0)]), attempt_number=1, fence=3)
    [later] = leave_event_file(write_samples(tmp_path, 2, [record(2, loss=3.0)]), attempt_number=2, fence=5)
    assert [step for _, step, _ in read_events(tmp_path / earlier["file"])] == [1]
    assert [step for _, step, _ in read_events(tmp_path / later["file"])] == [1, 2]


def test_a_job_that_measured_nothing_leaves_no_file(tmp_path: Path) -> None:
    assert leave_event_file(write_samples(tmp_path, 1, []), attempt_number=1, fence=3) == []
    assert not (tmp_path / "artifacts").exists()
