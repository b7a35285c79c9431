"""Connections that a library makes are given up by the kernel where the other computer is silent."""

import socket

from optimizer.runtime.ranks.connections import SILENCE_S, giving_up_silent_connections


def limit_of(connection: socket.socket) -> tuple[int, int]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_connections_made_within_have_the_limit_and_those_before_do_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as before:
        with giving_up_silent_connections():
            within = socket.create_connection(server.getsockname())
        with within:
            assert limit_of(within) == (1, SILENCE_S * 1000)
            assert limit_of(before) == (0, 0)
            within.sendall(b"still usable")
