"""Clients that hang up, ask for too much, or all come at once."""

import contextlib
import random
import socket
from collections.abc import Iterator

from tests.chaos.faults.fault import fault, require
from tests.chaos.world import World

_NUM_SOCKETS = 60


@fault("sixty connections that say nothing", place="clients", lasts_s=(1.0, 3.0))
def silent_connections(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        _connect(world, opened)
        yield


@fault("sixty requests that hang up half-way", place="clients", lasts_s=(0.2, 1.0))
def broken_requests(world: World, chance: random.Random) -> Iterator[None]:
    head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999\r\n\r\n{"
    with contextlib.ExitStack() as opened:
        for made in _connect(world, opened):
            with contextlib.suppress(OSError):
                made.sendall(head)
        yield


@fault("sixty requests for pages whose answers nobody reads", place="clients", lasts_s=(1.0, 3.0))
def unread_answers(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for made in _connect(world, opened):
            with contextlib.suppress(OSError):
                made.sendall(b"GET /login/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        yield


@fault("something that is not HTTP", place="clients")
def not_http(world: World, chance: random.Random) -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for made in _connect(world, opened):
            with contextlib.suppress(OSError):
                made.sendall(chance.randbytes(2000))
        yield


def _connect(world: World, opened: contextlib.ExitStack) -> list[socket.socket]:
    address = ("127.0.0.1", int(world.url.rpartition(":")[2]))
    made = []
    for _ in range(_NUM_SOCKETS):
        with contextlib.suppress(OSError):
            made.append(opened.enter_context(socket.create_connection(address, timeout=2)))
    require(made, "nobody listens")
    return made
