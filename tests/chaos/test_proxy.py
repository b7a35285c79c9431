"""The relay that campaigns harm connections with."""

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.proxy import FaultProxy, Manner
from tests.worker.processes import wait_for

TEXT = bytes(range(256)) * 40


@pytest.fixture
def folder() -> Iterator[Path]:
    # a Unix socket's path may have 107 characters
    with tempfile.TemporaryDirectory(prefix="hr-") as path:
        yield Path(path)


@pytest.fixture
def proxy(folder: Path) -> Iterator[FaultProxy]:
    """Before a server that sends back what it gets."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "server.sock"))
    listener.listen()

    def echo(connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(4096):
                connection.sendall(piece)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with closing(FaultProxy(folder / "relay.sock", folder / "server.sock")) as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(folder: Path, *, timeout_s: float = 20.0) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(timeout_s)
    client.connect(str(folder / "relay.sock"))
    return client


def receive(client: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes and (piece := client.recv(num_bytes - len(received))):
        received += piece
    return received


@pytest.mark.parametrize("manner", ["well", "late", "sliced"])
def test_what_is_sent_arrives_whole_in_every_manner(proxy: FaultProxy, folder: Path, manner: Manner) -> None:
    proxy.pass_on(manner)
    with connect(folder) as client:
        client.sendall(TEXT)
        assert receive(client, len(TEXT)) == TEXT
    assert (proxy.num_harmed > 0) == (manner != "well")


def test_what_is_held_back_arrives_once_it_is_let_through(proxy: FaultProxy, folder: Path) -> None:
    with connect(folder, timeout_s=0.3) as client:
        client.sendall(b"before")
        assert receive(client, 6) == b"before"
        proxy.pass_on("not at all")
        client.sendall(TEXT)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(20)
        proxy.pass_on("well")
        assert receive(client, len(TEXT)) == TEXT


def test_a_cut_ends_every_connection_and_leaves_new_ones_alone(proxy: FaultProxy, folder: Path) -> None:
    with connect(folder) as client:
        client.sendall(b"before")
        assert receive(client, 6) == b"before"
        assert proxy.cut() == 2, "the client's and the server's ends"
        assert client.recv(1) == b""
    with connect(folder) as client:
        client.sendall(b"after")
        assert receive(client, 5) == b"after"


def test_a_server_that_is_away_ends_the_connection_as_it_would_without_the_relay(folder: Path) -> None:
    with closing(FaultProxy(folder / "relay.sock", folder / "nobody.sock")), connect(folder) as client:
        assert client.recv(1) == b""


def test_closing_it_ends_what_is_open(proxy: FaultProxy, folder: Path) -> None:
    with connect(folder) as client:
        client.sendall(b"before")
        assert receive(client, 6) == b"before"
        other = FaultProxy(folder / "other.sock", folder / "server.sock")
        other.close()
        wait_for(lambda: not any(thread.name == "other" for thread in threading.enumerate()), what="its thread to end")
