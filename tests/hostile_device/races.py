"""Finds accesses to the same bytes that nothing puts in order, with a vector clock for each stream and one for the host.

The idea is that of torch.cuda._sanitizer. A stream's clock counts its own ops, and knows of the others' what events made it wait
for; what the host queues comes after all that the host knows. Two accesses to overlapping bytes, one of them a write, are in
order if the later one's clock knows of the earlier one. Beyond the sanitizer: ranges of bytes, pinned memory, in which the
host is one more that reads and writes, and memory that is made (a write by compute: the block may have been used by it before)
and let go (the next owner's compute writes to it).

*Not modelled*: threads of the host are one; what orders them among themselves (futures, queues) is not looked at.
"""

import weakref
from collections.abc import Iterable

import torch

from tests.hostile_device.footprint import Span

HOST = "host"
COMPUTE = "compute"
Clock = dict[str, int]


class _Range:
    """Latest accesses to some bytes, each with its number and its op, by who made it."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[str, tuple[int, object]] = {}
        self.writes: dict[str, tuple[int, object]] = {}


class _Storage:
    __slots__ = ("is_pinned", "num_bytes", "ranges", "reference")

    def __init__(self, reference: "weakref.ref[torch.UntypedStorage]", num_bytes: int) -> None:
        self.reference = reference
        self.num_bytes = num_bytes
        self.is_pinned = False
        self.ranges: dict[tuple[int, int], _Range] = {}


class Races:
    """Not thread-safe: who calls holds the device's lock."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}, COMPUTE: {}}
        self.faults: list[str] = []
        self._storages: dict[int, _Storage] = {}

    def add_actor(self, name: str) -> None:
        self.clocks[name] = {}

    def join(self, actor: str, clock: Clock) -> None:
        """Order all that ``actor`` does from now on after all that the clock knows."""
        own = self.clocks[actor]
        for other, number in clock.items():
            if own.get(other, 0) < number:
                own[other] = number

    def clock_of(self, actor: str) -> Clock:
        return dict(self.clocks[actor])

    def access(self, actor: str, label: object, *, reads: Iterable[Span], writes: Iterable[Span], moment: str = "") -> None:
        """An op that the host queues now, or does itself."""
        clock = self.clocks[actor]
        if actor != HOST:
            self.join(actor, self.clocks[HOST])
        number = clock[actor] = clock.get(actor, 0) + 1
        for spans, is_write in ((reads, False), (writes, True)):
            for span in spans:
                if span.end > span.start:
                    self._touch(self._storage(span.storage), span, actor, number, label, is_write=is_write, moment=moment)

    def pin(self, storage: torch.UntypedStorage) -> None:
        self._storage(storage).is_pinned = True

    def is_pinned(self, storage: torch.UntypedStorage) -> bool:
        known = self._storages.get(storage._cdata)
        return known is not None and known.is_pinned

    def let_go(self, storage: torch.UntypedStorage, *, moment: str = "") -> None:
        """The storage's memory goes though the storage stays (``resize_``, the end of pinning)."""
        known = self._storages.pop(storage._cdata, None)
        if known is not None:
            self._check_gone(known, moment)

    # Helpers.

    def _storage(self, storage: torch.UntypedStorage) -> _Storage:
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(weakref.ref(storage, lambda _: self._gone(key)), storage.nbytes())
        return known

    def _gone(self, key: int) -> None:
        known = self._storages.pop(key, None)
        if known is not None:
            self._check_gone(known, "")

    def _check_gone(self, known: _Storage, moment: str) -> None:
        """Its next owner's compute comes after what compute and the host know now."""
        knows = dict(self.clocks[HOST])
        for other, number in () if known.is_pinned else dict(self.clocks[COMPUTE]).items():
            knows[other] = max(knows.get(other, 0), number)
        for (start, end), accesses in known.ranges.items():
            for other, (number, label) in (*accesses.reads.items(), *accesses.writes.items()):
                is_own = other == HOST or (other == COMPUTE and not known.is_pinned)
                if not is_own and knows.get(other, 0) < number:
                    self._report(known, start, end, f"is let go{moment} while {other} may still run {label}")

    def _touch(
        self, known: _Storage, span: Span, actor: str, number: int, label: object, *, is_write: bool, moment: str
    ) -> None:
        clock = self.clocks[actor]
        own: _Range | None = None
        covered = []
        for (start, end), accesses in known.ranges.items():
            if start >= span.end or end <= span.start:
                continue
            for earlier, verb in ((accesses.writes, "writes"), (accesses.reads if is_write else {}, "reads")):
                for other, (other_number, other_label) in earlier.items():
                    if other != actor and clock.get(other, 0) < other_number:
                        does = "writes" if is_write else "reads"
                        self._report(
                            known, span.start, span.end,
                            f"{actor} {does} it in {label}{moment}, not ordered after {other}, which {verb} it in {other_label}",
                        )
            if (start, end) == (span.start, span.end):
                own = accesses
            elif is_write and span.start <= start and end <= span.end:
                covered.append((start, end))
        for key in covered:
            del known.ranges[key]
        if own is None:
            own = known.ranges[span.start, span.end] = _Range()
        if is_write:
            own.reads.clear()
            own.writes.clear()
            own.writes[actor] = number, label
        else:
            own.reads[actor] = number, label

    def _report(self, known: _Storage, start: int, end: int, what: str) -> None:
        kind = "pinned" if known.is_pinned else "device"
        self.faults.append(f"bytes {start:,} to {end:,} of {known.num_bytes:,} of {kind} memory: {what}")
