"""JSON lines between an attempt and its supervisor."""

import contextlib
import json
import os
from collections.abc import Iterator

import pytest

from worker.run.pipe import MAX_LINE_BYTES, PipeReader, PipeWriter, encode_line


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_messages_arrive_whole_and_in_order(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    writer, reader = PipeWriter(write_fd), PipeReader(read_fd)
    for step in range(5):
        writer.send({"type": "sample", "step": step})
    assert [message["step"] for message in reader.read(timeout_s=1)] == [0, 1, 2, 3, 4]


def test_a_message_in_two_pieces_is_read_once_it_is_whole(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    reader = PipeReader(read_fd)
    line = encode_line({"type": "phase", "phase": "training"})
    os.write(write_fd, line[:7])
    assert reader.read(timeout_s=1) == []
    os.write(write_fd, line[7:])
    assert reader.read(timeout_s=1) == [{"type": "phase", "phase": "training"}]


def test_a_full_pipe_never_blocks_the_writer_and_drops_only_what_may_be_dropped(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    writer, reader = PipeWriter(write_fd), PipeReader(read_fd)
    for step in range(3000):
        writer.send({"type": "sample", "step": step, "padding": "x" * 100}, droppable=True)
    writer.send({"type": "phase", "phase": "saving"})
    assert writer.num_dropped > 0
    received = []
    while messages := reader.read(timeout_s=0):
        received += messages
        writer.drain(timeout_s=0)
    assert received[-1] == {"type": "phase", "phase": "saving"}
    assert len(received) == 3000 - writer.num_dropped + 1


def test_drain_reports_when_the_reader_did_not_take_all(ends: tuple[int, int]) -> None:
    _, write_fd = ends
    writer = PipeWriter(write_fd)
    for _ in range(100):
        writer.send({"type": "log", "message": "x" * 1000})
    assert writer.drain(timeout_s=0.01) is False


def test_an_oversized_message_is_dropped_and_counted(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    writer, reader = PipeWriter(write_fd), PipeReader(read_fd)
    writer.send({"type": "log", "message": "x" * MAX_LINE_BYTES})
    writer.send({"type": "log", "message": "short"})
    assert writer.num_dropped == 1
    assert reader.read(timeout_s=1) == [{"type": "log", "message": "short"}]


def test_an_endless_line_is_skipped_up_to_its_end(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    reader = PipeReader(read_fd)
    chunk = b"x" * 60_000
    for _ in range(3):
        os.write(write_fd, chunk)
        assert reader.read(timeout_s=1) == []
    os.write(write_fd, b"x\n" + encode_line({"type": "log", "message": "after"}))
    assert reader.read(timeout_s=1) == [{"type": "log", "message": "after"}]


@pytest.mark.parametrize("line", [b"not json\n", b"[1, 2]\n", b"\xff\xfe\n", b'{"a":\n'])
def test_what_is_not_a_message_is_left_out(ends: tuple[int, int], line: bytes) -> None:
    read_fd, write_fd = ends
    reader = PipeReader(read_fd)
    os.write(write_fd, line + encode_line({"type": "log", "message": "good"}))
    assert reader.read(timeout_s=1) == [{"type": "log", "message": "good"}]


def test_the_end_of_the_writers_is_seen(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    reader = PipeReader(read_fd)
    os.close(write_fd)
    assert reader.read(timeout_s=1) == []
    assert reader.is_at_end


def test_a_reader_that_is_gone_does_not_stop_the_writer(ends: tuple[int, int]) -> None:
    read_fd, write_fd = ends
    writer = PipeWriter(write_fd)
    os.close(read_fd)
    writer.send({"type": "log", "message": "to nobody"})
    assert writer.drain(timeout_s=0)


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json.loads(encode_line({"loss": float("nan"), "deep": [float("inf"), 1.5]})) == {
        "loss": None,
        "deep": [None, 1.5],
    }
