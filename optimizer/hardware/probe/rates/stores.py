"""Rates of the disk and of the remote store, written and read as the runtime does: to the store itself and from it, past the page
cache, which what does not fit in memory cannot count on; and what the page cache gives where it does.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.base.errors import DiskFull, HeadroomError
from optimizer.formats.transfer_sizes import SLAB_BYTES
from optimizer.hardware.probe.clock import MAX_REPEATS
from optimizer.runtime.tiers.disk import DiskStore
from optimizer.runtime.tiers.remote import RemoteStore, remote_url
from optimizer.runtime.tiers.stores import Store

_STORED_BYTES = 4 * SLAB_BYTES
_CACHED_BYTES = 32 * SLAB_BYTES
"""More than a processor's caches hold."""
_FEW_BYTES = 64
_REMOTE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Rates and room of a store; nothing where there is none."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    cached_read_bytes_per_s: float | None = None
    """Rate of reading what the page cache holds."""
    round_trip_s: float | None = None
    free_bytes: int = 0
    fault: str = ""
    """Why a store that should be there is not."""


def probe_disk(folder: Path, *, max_s: float) -> Stored:
    """Nothing where the folder cannot be written to or its disk is full."""
    try:
        store = DiskStore(folder)
        with _closing(store):
            free_bytes = shutil.disk_usage(folder).free
            found = _store_rates(store, store.flush, max_s=max_s * 3 / 4, free_bytes=free_bytes)
            return replace(found, cached_read_bytes_per_s=_cached_rate(store, max_s=max_s / 4))
    except (OSError, DiskFull) as error:
        return Stored(fault=str(error))


def probe_remote(*, max_s: float) -> Stored:
    url = remote_url()
    if url is None:
        return Stored()
    try:
        store = RemoteStore(url, timeout_s=_REMOTE_TIMEOUT_S)
        with _closing(store):
            return _store_rates(store, lambda: None, max_s=max_s, free_bytes=store.free_bytes() or 0)
    except HeadroomError as error:
        return Stored(fault=str(error))


def _store_rates(store: Store, flush: Callable[[], None], *, max_s: float, free_bytes: int) -> Stored:
    """Rates of one store. flush: until what was written has arrived and what is read next comes from there."""
    place = store.take(_STORED_BYTES)
    data = memoryview(bytearray(_STORED_BYTES))

    def write() -> None:
        for start in range(0, _STORED_BYTES, SLAB_BYTES):
            store.write(place, data[start : start + SLAB_BYTES], offset=start)
        flush()

    def read() -> None:
        for start in range(0, _STORED_BYTES, SLAB_BYTES):
            store.read(place, data[start : start + SLAB_BYTES], offset=start)
        flush()

    rates = [_STORED_BYTES / _quartile_s(run, max_s=max_s) for run in (write, read)]
    round_trip_s = _quartile_s(lambda: store.read(place, data[:_FEW_BYTES], offset=0), max_s=max_s / 10)
    return Stored(
        write_bytes_per_s=rates[0], read_bytes_per_s=rates[1], round_trip_s=round_trip_s, free_bytes=free_bytes
    )


def _cached_rate(store: DiskStore, *, max_s: float) -> float | None:
    """Rate of reading what was just written and is still cached; None where the disk has no room for so much."""
    try:
        place = store.take(_CACHED_BYTES)
    except DiskFull:
        return None
    data = memoryview(bytearray(SLAB_BYTES))
    starts = range(0, _CACHED_BYTES, SLAB_BYTES)
    for start in starts:
        store.write(place, data, offset=start)

    def read() -> None:
        for start in starts:
            store.read(place, data, offset=start)

    return _CACHED_BYTES / _quartile_s(read, max_s=max_s)


@contextmanager
def _closing(store: Store) -> Iterator[None]:
    try:
        yield
    finally:
        store.close()


def faults_of(**stored: Stored) -> dict[str, str]:
    return {name: found.fault for name, found in stored.items() if found.fault}


def _quartile_s(run: Callable[[], object], *, max_s: float) -> float:
    """First quartile of times by the wall clock, since a store works while the process waits; otherwise as
    ``probe/clock.py`` does.
    """
    durations: list[float] = []
    started_s = time.perf_counter()
    while len(durations) < 2 or (len(durations) < MAX_REPEATS and time.perf_counter() - started_s < max_s):
        begin_s = time.perf_counter()
        run()
        durations.append(time.perf_counter() - begin_s)
    return max(sorted(durations[1:])[len(durations[1:]) // 4], 1e-9)
