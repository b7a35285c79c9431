"""Has the kernel give up connections between ranks whose other end can no longer be reached.

gloo sets no such limit: where a cable is pulled, or another machine loses its power, nothing comes back that would end a wait,
and ranks would have patience for each other (``group.TIMEOUT_S``). A rank that is alive and slow answers by its kernel, however
long its step takes, so this needs no guess at how long that may be. TCP(7): SO_KEEPALIVE and TCP_USER_TIMEOUT; Linux.

There is one case in which an answer does not count: the other's buffers are full, and nobody there reads. gloo sends a tensor
only once the other waits for it, and a thread of its own reads, so that is a process halted in the middle of a tensor, which its
leader ends anyway (``worker/run/watch/halted.py``), or a machine that swaps so much that not even that thread runs.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

SILENCE_S: Final = 12
"""Seconds without any answer from the other computer after which a connection is closed: six sendings again. A link that is full
answers late, by its round trip and what waits in its queues, which is tenths of a second on 200 Mbit/s with 20 ms; one that is
plugged in again, or a switch that starts, takes some seconds. Longer than a halted process is given, so that it is named itself.
"""
_PROBE_S: Final = 3
"""Seconds of rest before a first question whether the other is there, and between two."""


@contextmanager
def giving_up_silent_connections() -> Iterator[None]:
    """Set the limit on all TCP connections that are made within, by whatever library. Where the kernel knows no such limit
    nothing is set.
    """
    before = _list_sockets()
    yield
    for fd in _list_sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                _limit(connection)


def _limit(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _list_sockets() -> set[int]:
    """Numbers of this process's open sockets."""
    found = set[int]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(path.readlink()).startswith("socket:"):
                found.add(int(path.name))
    return found
