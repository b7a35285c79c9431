"""Questions to a served model, and its answers: JSON lines over one socket between the attempt and its supervisor.

The attempt's end. A thread reads, so that the loop that makes tokens never waits for a line; the loop alone writes. The end of
the lines means that nobody will ask any more.
"""

import json
import queue
import socket
import threading
from typing import Any

from worker.run.pipe import encode_line

Ask = dict[str, Any]
END: Ask = {"type": "end"}


class AskSocket:
    """Use as a context manager."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._asks: queue.Queue[Ask] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="asks", daemon=True)
        self._reader.start()

    def __enter__(self) -> "AskSocket":
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def take(self, *, timeout_s: float) -> list[Ask]:
        """All that has come, after waiting at most so long for the first."""
        found: list[Ask] = []
        try:
            found.append(self._asks.get(timeout=timeout_s) if timeout_s else self._asks.get_nowait())
            while True:
                found.append(self._asks.get_nowait())
        except queue.Empty:
            return found

    def send(self, messages: list[dict[str, Any]]) -> None:
        """Answers, in order. A supervisor that is gone takes none; this process ends with it."""
        if messages:
            self._socket.sendall(b"".join(encode_line(message) for message in messages))

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._asks.put(json.loads(line))
        except (OSError, ValueError):
            pass  # closed from this side, or cut off in mid-line: the end either way
        self._asks.put(END)
