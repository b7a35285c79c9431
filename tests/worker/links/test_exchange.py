"""A link is measured in both directions by who knows the token, within bounds, and by nobody else."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from optimizer.base.units import KIB, MIB
from tests.worker.links.slow_relay import slow_relay
from worker.links import exchange
from worker.links.exchange import LinkBroke, LinkFailed, answer, measure, open_listener

TOKEN = "of this probe"
HERE = "127.0.0.1"


class Listening:
    """A listener at work in a thread."""

    def __init__(self, *, limit_s: float = 20.0) -> None:
        self.socket = open_listener(HERE)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self.was_called: bool | None = None
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._answer, args=(limit_s,))
        self._thread.start()

    def _answer(self, limit_s: float) -> None:
        self.was_called = answer(self.socket, TOKEN, limit_s=limit_s, should_stop=self._stops.is_set)

    def end(self) -> bool | None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        return self.was_called

    def close(self) -> None:
        self._stops.set()
        self._thread.join(timeout=30)
        self.socket.close()


@contextmanager
def listening(**options: float) -> Iterator[Listening]:
    found = Listening(**options)
    try:
        yield found
    finally:
        found.close()


def test_a_link_on_one_computer_is_measured_at_every_size() -> None:
    with listening() as there:
        found = measure(*there.address, TOKEN, source=HERE)
        assert there.end()
    assert [size for size, _ in found.bytes_per_s_by_size] == [64 * KIB, MIB, 16 * MIB]
    assert 0 < found.round_trip_s < 0.1
    assert all(rate > 1e7 for _, rate in found.bytes_per_s_by_size)


@pytest.mark.parametrize(("delay_s", "bytes_per_s", "sizes"), [(0.01, 8e6, 3), (0.04, 1e6, 2)])
def test_a_slow_network_is_found_with_its_delay_and_its_rate(delay_s: float, bytes_per_s: float, sizes: int) -> None:
    with listening() as there, slow_relay(there.address, delay_s=delay_s, bytes_per_s=bytes_per_s) as relay:
        begun_s = time.monotonic()
        found = measure(*relay, TOKEN, source=HERE)
        assert time.monotonic() - begun_s < 15
    assert found.round_trip_s == pytest.approx(2 * delay_s, rel=0.25)
    assert len(found.bytes_per_s_by_size) == sizes
    assert found.bytes_per_s_by_size[-1][1] == pytest.approx(bytes_per_s, rel=0.25)


def test_who_has_another_token_learns_nothing_and_does_not_end_the_probe() -> None:
    with listening() as there:
        with pytest.raises(LinkFailed, match="closed the connection"):
            measure(*there.address, "another", source=HERE)
        with socket.create_connection(there.address) as stranger:
            stranger.sendall(b"x" * 100)
            assert len(stranger.recv(1000)) == 16  # the question, which says nothing
        assert measure(*there.address, TOKEN, source=HERE).round_trip_s > 0
        assert there.end()


def test_a_listener_ends_when_its_time_is_over_and_after_a_few_strangers() -> None:
    with listening(limit_s=0.5) as there:
        assert there.end() is False
    with listening() as there:
        for _ in range(8):
            with socket.create_connection(there.address) as stranger:
                stranger.sendall(b"x" * 48)
                stranger.recv(16)
        assert there.end() is False


def test_a_size_that_was_not_agreed_on_ends_the_connection() -> None:
    with listening() as there, socket.create_connection(there.address) as known:
        wire = exchange._Wire(known, deadline_s=time.monotonic() + 5)
        exchange._greet(wire, TOKEN)
        wire.send(exchange._COMMAND.pack(b"t", 2**32 - 1))
        with pytest.raises((LinkFailed, OSError)):
            wire.receive(1)
        assert there.end()


def test_what_cannot_be_reached_and_what_is_too_slow_is_said_in_words() -> None:
    with open_listener(HERE) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkFailed, match="connection refused"):
        measure(HERE, port, TOKEN, source=HERE)
    with (
        listening() as there,
        slow_relay(there.address, delay_s=0.0, bytes_per_s=20e3) as relay,
        pytest.raises(LinkFailed, match=r"the probe took longer than 2 s, [\d,]+ bytes had crossed"),
    ):
        measure(*relay, TOKEN, source=HERE, limit_s=2)


def test_a_side_that_goes_away_leaves_the_link_unknown() -> None:
    with socket.create_server((HERE, 0)) as listener:

        def end_early() -> None:
            connection, _ = listener.accept()
            with connection:
                exchange._is_known(exchange._Wire(connection, deadline_s=time.monotonic() + 5), TOKEN)

        threading.Thread(target=end_early, daemon=True).start()
        with pytest.raises(LinkBroke):
            measure(HERE, listener.getsockname()[1], TOKEN, source=HERE)


def test_another_service_at_the_port_is_no_listener() -> None:
    with socket.create_server((HERE, 0)) as other:

        def pretend() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"n" * 16)
                connection.recv(48)
                connection.sendall(b"h" * 32)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(LinkFailed, match="something else answers at that port"):
            measure(HERE, other.getsockname()[1], TOKEN, source=HERE)
