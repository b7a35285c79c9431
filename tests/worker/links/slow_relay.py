"""A relay between two TCP sockets with the delay and the rate of a slow network, each way."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE_BYTES = 16 * 1024
_SLACK_S = 0.01
"""A thread that woke late sends what it owes at once."""


@contextmanager
def slow_relay(target: tuple[str, int], *, delay_s: float, bytes_per_s: float) -> Iterator[tuple[str, int]]:
    """Passes one connection on to ``target``; the address at which it listens. delay_s: of each byte, one way."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            near, _ = listener.accept()
            far = socket.create_connection(target)
            ends.extend((near, far))
            for here, there in ((near, far), (far, near)):
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pass_on, args=(here, there, delay_s, bytes_per_s), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[:2]
    finally:
        for end in (listener, *ends):
            with suppress(OSError):
                end.close()


def _pass_on(here: socket.socket, there: socket.socket, delay_s: float, bytes_per_s: float) -> None:
    """One direction: each piece leaves once the wire is free, and is there a delay later."""
    queue: list[tuple[float, bytes]] = []
    has_more = threading.Condition()

    def deliver() -> None:
        while True:
            with has_more:
                has_more.wait_for(lambda: bool(queue))
                at_s, piece = queue.pop(0)
            time.sleep(max(0.0, at_s - time.monotonic()))
            with suppress(OSError):
                if not piece:
                    there.shutdown(socket.SHUT_WR)
                    return
                there.sendall(piece)

    threading.Thread(target=deliver, daemon=True).start()
    free_s = time.monotonic()
    while True:
        try:
            piece = here.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        free_s = max(free_s, time.monotonic() - _SLACK_S) + len(piece) / bytes_per_s
        with has_more:
            queue.append((max(free_s, time.monotonic()) + delay_s, piece))
            has_more.notify()
        if not piece:
            return
        # as a full send buffer does: no more is taken than the wire holds
        time.sleep(max(0.0, free_s - time.monotonic()))
