"""The remote tier: the memory of another machine, behind a store that speaks the Redis protocol (Redis, Valkey).

The address comes from ``HEADROOM_REMOTE_URL`` (``redis://host:port/0``, ``rediss://`` for TLS, ``unix:///path``). Every key
begins with the run's own prefix, expires, and is deleted when its bytes are no longer needed, at the latest at close; values are
pieces of at most VALUE_BYTES. The package ``redis`` is imported when a store is opened.

A store may lose values (restarted, evicted, expired) and would take the next part of one as if the rest were zeros. So it is
known here how long each value has to be, and both reading and writing hold the store to it.
"""

import contextlib
import importlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from urllib.parse import urlsplit

from optimizer.base.categories import Lane, Link, Tier
from optimizer.base.errors import HeadroomError, InvalidInput, MissingExtra, RemoteStoreFull, RemoteStoreLost
from optimizer.base.units import KIB, MIB, format_bytes
from optimizer.runtime.tiers.stores import Place, Room

URL_VARIABLE = "HEADROOM_REMOTE_URL"
VALUE_BYTES = 2 * MIB
"""Bytes of one value: large enough that a round trip costs little, small enough that the store answers others in between."""
READ_BYTES = 256 * KIB
"""Bytes of one reply. redis-py puts replies together in several copies, each in new memory: 2 MiB in one reply took 8 to
18 ms on a machine where 8 replies took 1 ms together, both over a socket of the same machine."""
_SOCKET_BYTES = READ_BYTES + 64 * KIB
"""Asked of the socket at once: a reply of READ_BYTES then takes a sixth of what it takes in redis-py's 64 KiB."""
EXPIRY_S = 3600
"""After this long without its run, a value goes by itself: what a killed run leaves behind."""
RENEWAL_S = EXPIRY_S / 4
"""So often a run that reads or writes renews all that it keeps: what is written once and read for hours must not go."""
TIMEOUT_S = 20.0
_KEYS_AT_ONCE = 500


class RemoteStore:
    """Bytes under keys of one run.

    Raises MissingExtra without the package ``redis``, InvalidInput for an address that is none, RemoteStoreLost where nothing
    answers.
    """

    tier: ClassVar[Tier] = "remote"
    write_link: ClassVar[Link] = "host_to_remote"
    read_link: ClassVar[Link] = "remote_to_host"
    lane: ClassVar[Lane] = "network"

    def __init__(
        self, url: str, *, run_id: str | None = None, timeout_s: float = TIMEOUT_S, renewal_s: float = RENEWAL_S
    ) -> None:
        self.room = Room()
        self.prefix = f"headroom:{run_id or secrets.token_hex(8)}:"
        self._address = _without_password(url)
        self._errors, self._client = _connect(url, timeout_s=timeout_s)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}
        self._dead: list[str] = []
        self._written: dict[str, int] = {}
        """By key, up to where its value was written, or made."""
        self._lost_bytes = 0
        """Key of a value that was found lost. From then on nothing is written or read: the range that was refused is
        there now."""
        self._renewal_s, self._renewed_s = renewal_s, time.monotonic()
        with self._translating(0):
            self._client.ping()

    def take(self, num_bytes: int, *, is_made: bool = False) -> Place:
        place = Place(next(self._numbers), num_bytes)
        with self._lock:
            self._live[place.index] = num_bytes
        self.room.add(num_bytes)
        if is_made:
            try:
                self._make(place)
            except HeadroomError:
                self.give_back(place)
                raise
        return place

    def give_back(self, place: Place) -> None:
        with self._lock:
            if self._live.pop(place.index, None) is not None:
                # Deleted by the next write: whoever lets go of bytes does not wait for the network.
                self._forget(place.index, place.num_bytes)
        self.room.add(-place.num_bytes)

    def write(self, place: Place, data: memoryview, *, offset: int) -> None:
        self._check()
        self._bury()
        self._renew()
        for key, within, start, end in self._pieces(place, offset, len(data)):
            piece = data[start:end]
            is_whole = within == 0 and len(piece) == self._piece_bytes(place, offset + start)
            held_bytes = known_bytes = self._written.get(key, 0)
            with self._translating(len(piece)):
                if is_whole:
                    self._client.set(key, piece, ex=EXPIRY_S)
                else:
                    # One round trip, and nobody sees the value between.
                    commands = self._client.pipeline(transaction=True)
                    commands.strlen(key).setrange(key, within, piece).expire(key, EXPIRY_S)
                    held_bytes = commands.execute()[0]
            if held_bytes < known_bytes:
                raise self._lost(known_bytes)
            with self._lock:
                self._written[key] = max(self._written.get(key, 0), within + len(piece))

    def read(self, place: Place, into: memoryview, *, offset: int) -> None:
        """Read a range; bytes that were never written are zeros."""
        self._check()
        self._renew()
        for key, within, start, end in self._pieces(place, offset, len(into)):
            for first in range(start, end, READ_BYTES):
                last, at = min(end, first + READ_BYTES), within + first - start
                known_bytes = min(last - first, max(0, self._written.get(key, 0) - at))
                with self._translating(last - first):
                    value: bytes = self._client.getrange(key, at, at + last - first - 1)
                if len(value) < known_bytes:
                    raise self._lost(known_bytes)
                into[first:last] = value.ljust(last - first, b"\0")

    def free_bytes(self) -> int | None:
        """Room left under the store's own limit, or on its machine where it has none; None where it does not say."""
        with self._translating(0):
            memory: dict[str, Any] = self._client.info("memory")
        limit_bytes = memory.get("maxmemory") or memory.get("total_system_memory")
        used_bytes = memory.get("used_memory")
        return max(0, limit_bytes - used_bytes) if limit_bytes and used_bytes is not None else None

    def close(self) -> None:
        with self._lock:
            live, self._live = self._live, {}
            for index, num_bytes in live.items():
                self._forget(index, num_bytes)
        # What cannot be deleted now expires.
        with contextlib.suppress(RemoteStoreLost):
            self._bury()
        self._client.close()

    def _make(self, place: Place) -> None:
        """A value that grows by parts takes up to twice its bytes in the store; made at its full length it takes them once."""
        self._bury()
        for key, _, start, end in self._pieces(place, 0, place.num_bytes):
            with self._translating(end - start):
                commands = self._client.pipeline(transaction=True)
                commands.setrange(key, end - start - 1, b"\0").expire(key, EXPIRY_S)
                commands.execute()
            with self._lock:
                self._written[key] = end - start

    def _bury(self) -> None:
        with self._lock:
            dead, self._dead = self._dead, []
        with self._translating(0):
            for start in range(0, len(dead), _KEYS_AT_ONCE):
                self._client.unlink(*dead[start : start + _KEYS_AT_ONCE])

    def _renew(self) -> None:
        """Now and then: what is kept expires as late as if it were new."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._renewed_s < self._renewal_s:
                return
            self._renewed_s = now_s
            kept = list(self._written)
        with self._translating(0):
            for start in range(0, len(kept), _KEYS_AT_ONCE):
                commands = self._client.pipeline(transaction=False)
                for key in kept[start : start + _KEYS_AT_ONCE]:
                    commands.expire(key, EXPIRY_S)
                commands.execute()

    def _forget(self, index: int, num_bytes: int) -> None:
        """To be called under the lock."""
        keys = self._keys(index, num_bytes)
        self._dead += keys
        for key in keys:
            self._written.pop(key, None)

    def _keys(self, index: int, num_bytes: int) -> list[str]:
        return [f"{self.prefix}{index}:{piece}" for piece in range(-(-num_bytes // VALUE_BYTES))]

    def _pieces(self, place: Place, offset: int, num_bytes: int) -> Iterator[tuple[str, int, int, int]]:
        """For each value touched: its key, where in it, and which part of the caller's bytes."""
        start = 0
        while start < num_bytes:
            piece, within = divmod(offset + start, VALUE_BYTES)
            end = min(num_bytes, start + VALUE_BYTES - within)
            yield f"{self.prefix}{place.index}:{piece}", within, start, end
            start = end

    def _piece_bytes(self, place: Place, offset: int) -> int:
        """Key and range of the value that holds ``offset``; the last one of a place is shorter."""
        first = offset // VALUE_BYTES * VALUE_BYTES
        return min(VALUE_BYTES, place.num_bytes - first)

    def _check(self) -> None:
        if self._lost_bytes:
            raise self._lost(self._lost_bytes)

    def _lost(self, num_bytes: int) -> RemoteStoreLost:
        self._lost_bytes = num_bytes
        return RemoteStoreLost(
            f"the remote store at {self._address} no longer holds {format_bytes(num_bytes)} that this run wrote to it; "
            "it was restarted, or evicts keys, or they expired",
            hint="Use a store that evicts nothing (maxmemory-policy noeviction), or a plan without the remote tier.",
            address=self._address,
        )

    @contextlib.contextmanager
    def _translating(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            raise RemoteStoreLost(
                f"the remote store at {self._address} does not answer: {error}",
                hint=f"Start it again, set {URL_VARIABLE} to one that runs, or choose a plan without the remote tier.",
                address=self._address,
            ) from error
        except self._errors.ResponseError as error:
            # Of several commands sent at once redis-py names before that which of them it was, with what it carried.
            answer = str(error).rpartition("caused error: ")[2]
            if not _is_full(answer):
                raise RemoteStoreLost(
                    f"the remote store at {self._address} refuses a command: {answer}",
                    hint="Check its access rules and that it is writable.",
                    address=self._address,
                ) from error
            raise RemoteStoreFull(
                f"the remote store at {self._address} is full: {format_bytes(num_bytes)} more were needed, "
                f"{format_bytes(self.room.used_bytes)} are this run's ({answer})",
                hint="Raise the store's maxmemory, or choose a plan that keeps less there.",
                address=self._address,
                requested_bytes=num_bytes,
                in_use_bytes=self.room.used_bytes,
            ) from error


def remote_url() -> str | None:
    """The configured store's address; None where there is none."""
    return os.environ.get(URL_VARIABLE) or None


def _connect(url: str, *, timeout_s: float) -> tuple[Any, Any]:
    try:
        redis: Any = importlib.import_module("redis")
    except ImportError as error:
        raise MissingExtra("redis", needed_for="the remote tier") from error
    from_url: Callable[..., Any] = redis.Redis.from_url
    try:
        client = from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, socket_read_size=_SOCKET_BYTES
        )
    except ValueError as error:
        raise InvalidInput(
            f"{URL_VARIABLE} is {_without_password(url)!r}, which is no address of a store: {error}",
            field=URL_VARIABLE,
            value=_without_password(url),
            allowed="redis://, rediss:// or unix://",
        ) from error
    return redis.exceptions, client


def _is_full(answer: str) -> bool:
    """Redis says ``OOM command not allowed when used memory > 'maxmemory'``; redis-py drops the first word in some versions."""
    return "OOM" in answer or "maxmemory" in answer


def _without_password(url: str) -> str:
    """For messages."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url
