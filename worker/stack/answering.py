"""Notices a web server that runs and answers nobody: its loop is stuck, or all that it could work with waits for something.

It is asked for ``/healthz`` again and again. Nothing here waits, since the supervisor has one thread: each look goes on with the
question that is under way. Any answer counts, also a refusal.
"""

import contextlib
import select
import socket
from dataclasses import dataclass, field
from typing import Final

SILENT_S: Final = 120.0
"""Time without an answer: far longer than a lock of the database, or a machine with too much to do, keeps one waiting."""
ASK_EVERY_S: Final = 10.0
_PATIENCE_S: Final = 30.0
"""After this a question is given up, and asked anew."""
_LONGEST_TURN_S: Final = 2.0
"""Most that counts of the time between two looks: a supervisor that was halted itself has heard nothing either."""


@dataclass(kw_only=True)
class AnswerWatch:
    """Watches one process, from when it first answered. It may take as long as it likes to begin."""

    host: str
    port: int
    _connection: socket.socket | None = None
    _is_asked: bool = False
    _asked_at: float = 0.0
    _ask_again_at: float = 0.0
    _looked_at: float | None = None
    _silent_s: float | None = field(default=None)
    """None before the first answer."""

    def is_silent(self, now: float) -> bool:
        """Report whether it has answered before, and not for ``SILENT_S``; to be asked every second or so. now: monotonic."""
        turn_s = 0.0 if self._looked_at is None else min(now - self._looked_at, _LONGEST_TURN_S)
        self._looked_at = now
        if self._silent_s is not None:
            self._silent_s += turn_s
        try:
            self._go_on(now)
        except OSError:  # refused, or closed in the midst of it
            self.close()
        return self._silent_s is not None and self._silent_s >= SILENT_S

    def close(self) -> None:
        """Give up the question that is under way."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _go_on(self, now: float) -> None:
        if self._connection is None:
            if now >= self._ask_again_at:
                self._begin(now)
            return
        if not self._is_asked and select.select([], [self._connection], [], 0)[1]:
            self._connection.send(f"GET /healthz HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
            self._is_asked = True
        if self._is_asked and select.select([self._connection], [], [], 0)[0]:
            if self._connection.recv(4096):
                self._silent_s = 0.0
            self.close()
        elif now - self._asked_at > _PATIENCE_S:
            self.close()

    def _begin(self, now: float) -> None:
        self._asked_at, self._ask_again_at, self._is_asked = now, now + ASK_EVERY_S, False
        self._connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(BlockingIOError):  # it is on its way
            self._connection.connect((self.host, self.port))
