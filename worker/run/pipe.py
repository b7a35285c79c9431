"""JSON lines from an attempt to its supervisor, one pipe, at most 64 KiB a line, neither side ever made to wait.

What matters is also on disk (``samples.jsonl``, ``result.json``, the checkpoints), so a line that finds the pipe full may be
dropped; it is counted. torch-free and Django-free: both ends use it.
"""

import errno
import json
import logging
import math
import os
import select
import time
from collections import deque
from typing import Any

MAX_LINE_BYTES = 64 * 1024
_MAX_BACKLOG_LINES = 1000

logger = logging.getLogger(__name__)


class PipeWriter:
    """The attempt's end."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._backlog: deque[bytes] = deque()
        self.num_dropped = 0

    def send(self, message: dict[str, Any], *, droppable: bool = False) -> None:
        """Write now what the pipe takes. The rest waits here, except a droppable message, which gives way."""
        line = encode_line(message)
        self._flush()
        is_full = bool(self._backlog) and (droppable or len(self._backlog) >= _MAX_BACKLOG_LINES)
        if len(line) > MAX_LINE_BYTES or is_full:
            self.num_dropped += 1
            return
        self._backlog.append(line)
        self._flush()

    def drain(self, *, timeout_s: float) -> bool:
        """Wait for the reader to take what is left; False when it did not in time."""
        deadline = time.monotonic() + timeout_s
        self._flush()
        while self._backlog and (left_s := deadline - time.monotonic()) > 0:
            select.select([], [self._fd], [], left_s)
            self._flush()
        return not self._backlog

    def _flush(self) -> None:
        while self._backlog:
            line = self._backlog[0]
            try:
                num_written = os.write(self._fd, line)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._backlog.clear()  # nobody reads any more; the files still hold everything
                return
            if num_written < len(line):
                self._backlog[0] = line[num_written:]
                return
            self._backlog.popleft()


class PipeReader:
    """The supervisor's end: whole messages of what has arrived. What is not a JSON object in one line is dropped and logged."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self._is_skipping = False
        self.is_at_end = False

    def read(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """Wait at most ``timeout_s`` for something, then return it; empty when nothing came or the writers are gone."""
        if self.is_at_end:
            return []
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return []
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return []
        self.is_at_end = not data
        return self._parse(data)

    def _parse(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            if self._is_skipping:
                self._is_skipping = False
            elif (message := _decode_line(line)) is not None:
                messages.append(message)
        if len(self._rest) > MAX_LINE_BYTES:
            logger.warning("a line of more than %d bytes came from the job's process; dropped", MAX_LINE_BYTES)
            self._rest, self._is_skipping = b"", True
        return messages


def encode_line(message: dict[str, Any]) -> bytes:
    """One line of strict JSON; numbers that are not finite become null, which both databases accept."""
    return json.dumps(_finite(message), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _decode_line(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        logger.warning("the job's process sent %d bytes that are not a message; dropped", len(line))
        return None
    return message


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
