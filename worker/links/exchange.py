"""Measures the network between two computers over one TCP connection: round trips, and pieces of a few sizes in both directions.

One side listens for as long as a probe takes, the other connects. Each proves by a hash that it knows the probe's token, which
never crosses the network; then the connecting side sends commands of a fixed form and times them. The listening side holds no
state but counters, and ends at a deadline or after so many bytes, whatever it is sent. Nothing is parsed and nothing is kept.

Its rates are of one connection with nothing else under way, and in the slower of the two directions.
"""

import hashlib
import hmac
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from optimizer.base.units import KIB, MIB

SIZES: Final = (64 * KIB, MIB, 16 * MIB)
LIMIT_S: Final = 20.0
"""Longest probe; the listening side closes after as long."""
CONNECT_S: Final = 5.0
"""Longest wait for a connection to open."""
_MOST_BYTES: Final = 512 * MIB
_MOST_STRANGERS: Final = 8
"""Connections without the token after which nobody is listened to any more."""
_GREETING_S: Final = 3.0
_NUM_PINGS: Final = 15
_REPEATS: Final = {SIZES[0]: 9, SIZES[1]: 7, SIZES[2]: 3}
_SIZE_S: Final = 5.0
"""Longest time for the pieces of one size, by what the size before took."""
_NONCE_BYTES: Final = 16
_HASH_BYTES: Final = 32
_COMMAND: Final = struct.Struct("!cI")
_PING, _TAKE, _GIVE, _END = b"p", b"t", b"g", b"e"
_BLOCK: Final = MIB


class LinkFailed(Exception):
    """The other side was not reached, or the probe did not come to its end; the message says why, in a few words."""


class LinkBroke(LinkFailed):
    """The other side was there and went away, as when its worker ends: nothing is known of the link."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A link as it was found."""

    round_trip_s: float
    """Median time of one byte to the other side and one back."""
    bytes_per_s_by_size: tuple[tuple[int, float], ...]
    """By size of a piece, the median rate in the slower direction, without the round trip. Sizes that would have taken too long
    are not there; the smallest always is."""


def open_listener(address: str) -> socket.socket:
    """A socket that listens at a free port of this address. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_MOST_STRANGERS)
    except OSError:
        listener.close()
        raise
    return listener


def answer(listener: socket.socket, token: str, *, limit_s: float = LIMIT_S, should_stop: Callable[[], bool]) -> bool:
    """Answer the one who knows the token, until it is done or the time is over. True where such a one came.

    should_stop: looked at while nobody is there.
    """
    deadline_s = time.monotonic() + limit_s
    for _ in range(_MOST_STRANGERS):
        connection = _accept(listener, deadline_s, should_stop)
        if connection is None:
            return False
        with connection:
            wire = _Wire(connection, deadline_s=min(deadline_s, time.monotonic() + _GREETING_S))
            try:
                if not _is_known(wire, token):
                    continue
                wire.deadline_s = deadline_s
                _serve(wire)
            except (OSError, LinkFailed):
                continue
            return True
    return False


def measure(address: str, port: int, token: str, *, source: str, limit_s: float = LIMIT_S) -> Measured:
    """Measure the link to who listens there. source: this side's own address, by which it goes out.

    Raises LinkFailed, and LinkBroke where the connection was lost after both had proved themselves.
    """
    deadline_s = time.monotonic() + limit_s
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S, source_address=(source, 0))
    except TimeoutError as error:
        raise LinkFailed(f"no answer within {CONNECT_S:.0f} s") from error
    except OSError as error:
        raise LinkFailed((error.strerror or str(error)).lower()) from error
    with connection:
        wire = _Wire(connection, deadline_s=deadline_s)
        is_known = False
        try:
            _greet(wire, token)
            is_known = True
            found = _measure(wire)
            wire.send(_COMMAND.pack(_END, 0))
        except TimeoutError as error:
            raise LinkFailed(f"the probe took longer than {limit_s:.0f} s, {wire.num_bytes:,} bytes had crossed") from error
        except (OSError, LinkFailed) as error:
            words = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            raise (LinkBroke if is_known else LinkFailed)(words) from error
    return found


class _Wire:
    """A connection with a deadline and a count of bytes."""

    def __init__(self, connection: socket.socket, *, deadline_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._buffer = bytearray(_BLOCK)
        self.deadline_s = deadline_s
        self.num_bytes = 0

    def send(self, content: bytes | memoryview) -> None:
        self._count(len(content))
        self._connection.sendall(content)

    def send_many(self, num_bytes: int) -> None:
        """Noise: what could be compressed on the way would seem to go faster."""
        noise = memoryview(_NOISE)
        while num_bytes > 0:
            self.send(noise[:num_bytes])
            num_bytes -= _BLOCK

    def receive(self, num_bytes: int) -> bytes:
        """At most a block. Raises LinkFailed where the other side has closed."""
        view = memoryview(self._buffer)[:num_bytes]
        filled = 0
        while filled < num_bytes:
            self._count(0)
            got = self._connection.recv_into(view[filled:])
            if not got:
                raise LinkFailed("the other side closed the connection")
            filled += got
        self.num_bytes += num_bytes
        return bytes(view[:_HASH_BYTES])

    def receive_many(self, num_bytes: int) -> None:
        while num_bytes > 0:
            self.receive(min(num_bytes, _BLOCK))
            num_bytes -= _BLOCK

    def _count(self, num_bytes: int) -> None:
        left_s = self.deadline_s - time.monotonic()
        self.num_bytes += num_bytes
        if left_s <= 0:
            raise TimeoutError
        if self.num_bytes > _MOST_BYTES:
            raise LinkFailed(f"more than {_MOST_BYTES:,} bytes")
        self._connection.settimeout(left_s)


_NOISE: Final = os.urandom(_BLOCK)
"""Made once; no secret."""


def _accept(listener: socket.socket, deadline_s: float, should_stop: Callable[[], bool]) -> socket.socket | None:
    listener.settimeout(0.2)
    while time.monotonic() < deadline_s and not should_stop():
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
    return None


def _is_known(wire: _Wire, token: str) -> bool:
    """The listening side's half of the greeting."""
    mine = os.urandom(_NONCE_BYTES)
    wire.send(mine)
    theirs, proof = wire.receive(_NONCE_BYTES), wire.receive(_HASH_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"connects", mine, theirs)):
        return False
    wire.send(_proof(token, b"listens", theirs, mine))
    return True


def _greet(wire: _Wire, token: str) -> None:
    """The connecting side's half."""
    theirs, mine = wire.receive(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
    wire.send(mine + _proof(token, b"connects", theirs, mine))
    if not hmac.compare_digest(wire.receive(_HASH_BYTES), _proof(token, b"listens", mine, theirs)):
        raise LinkFailed("something else answers at that port")


def _proof(token: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), role + first + second, hashlib.sha256)


def _serve(wire: _Wire) -> None:
    while True:
        command, num_bytes = _COMMAND.unpack(wire.receive(_COMMAND.size))
        if command == _END or num_bytes > SIZES[-1]:
            return
        if command == _TAKE:
            wire.receive_many(num_bytes)
        elif command == _GIVE:
            wire.send_many(num_bytes)
            continue
        elif command != _PING:
            return
        wire.send(b"!")


def _measure(wire: _Wire) -> Measured:
    trips = [_timed_s(lambda: _ping(wire)) for _ in range(_NUM_PINGS)]
    round_trip_s = statistics.median(trips)
    rates: list[tuple[int, float]] = []
    for size in SIZES:
        expected_s = 2 * size / rates[-1][1] if rates else 0.0
        if expected_s > _SIZE_S:
            break
        repeats = min(_REPEATS[size], max(1, int(_SIZE_S / expected_s))) if expected_s else _REPEATS[size]
        rates.append((size, _rate(wire, size, repeats, round_trip_s=round_trip_s)))
    return Measured(round_trip_s=round_trip_s, bytes_per_s_by_size=tuple(rates))


def _rate(wire: _Wire, size: int, repeats: int, *, round_trip_s: float) -> float:
    """Bytes per second of the slower direction."""
    begun_s, sent, given = time.monotonic(), [], []
    for _ in range(repeats):
        sent.append(_timed_s(lambda: _put(wire, size)))
        given.append(_timed_s(lambda: _get(wire, size)))
        if time.monotonic() - begun_s > _SIZE_S:
            break
    slower_s = max(statistics.median(sent), statistics.median(given))
    # a round trip is as uncertain as a small piece on a fast link is short
    return size / max(slower_s - round_trip_s, slower_s / 10)


def _ping(wire: _Wire) -> None:
    wire.send(_COMMAND.pack(_PING, 0))
    wire.receive(1)


def _put(wire: _Wire, size: int) -> None:
    wire.send(_COMMAND.pack(_TAKE, size))
    wire.send_many(size)
    wire.receive(1)


def _get(wire: _Wire, size: int) -> None:
    wire.send(_COMMAND.pack(_GIVE, size))
    wire.receive_many(size)


def _timed_s(act: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s
