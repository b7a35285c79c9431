"""Bounds connections whose request has not come whole: by the time that its headers take, and by how many there are.

uvicorn closes a connection that is idle between requests, and has no limit before and within the headers of one. Bodies are
``body_guard.py``'s.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_DEADLINE_S = 10.0
"""From a connection, or from the first byte of a further request on it, to the end of the request's headers."""
MAX_HALF_OPEN = 2_000
"""With one more the oldest are closed that did not send their headers at once; a thousand viewers may come at once."""
AT_ONCE_S = 1.0


class GuardedProtocol(H11Protocol):
    """uvicorn's own protocol, with a deadline for headers."""

    _half_open: "dict[GuardedProtocol, asyncio.TimerHandle]" = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin_waiting()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_within_headers = self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0])
        if not is_within_headers:
            self._end_waiting()
        elif self not in self._half_open:
            self._begin_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def _begin_waiting(self) -> None:
        self._half_open[self] = self.loop.call_later(HEADERS_DEADLINE_S, self.transport.abort)
        while len(self._half_open) > MAX_HALF_OPEN:
            oldest, timer = next(iter(self._half_open.items()))
            if self.loop.time() < timer.when() - HEADERS_DEADLINE_S + AT_ONCE_S:
                break
            oldest._end_waiting()
            oldest.transport.abort()

    def _end_waiting(self) -> None:
        if (timer := self._half_open.pop(self, None)) is not None:
            timer.cancel()
