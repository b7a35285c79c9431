"""Times what a step's lanes really do: how long each was busy, what compute stood still for, and when, within a step.

Measured is what runs on this program's own threads: copies on the CPU device, work of the host, reads and writes of the disk and
of a remote store. What a card does on its streams is not; nobody waits for it here, and asking each copy would cost the run.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from optimizer.base.categories import Lane

MAX_SPANS = 300
"""Most spans reported of one step; neighbours on a lane become one until there are no more."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of a lane, in milliseconds since ``begin``."""

    lane: Lane
    begin_ms: float
    end_ms: float
    is_stall: bool
    """True if compute stood still for it."""


@dataclass(frozen=True, kw_only=True)
class LaneTimes:
    """Since ``begin``; lanes without work left out."""

    busy_ms: dict[Lane, float] = field(default_factory=dict)
    stall_ms: dict[Lane, float] = field(default_factory=dict)
    """Milliseconds of it, and of waiting for it, in which compute stood still."""
    spans: tuple[Span, ...] = ()
    """In order of their begin; empty unless asked for."""


class LaneClock:
    """One for each ``Tiers``. Costs a microsecond or so for each copy, so it always runs: every thread notes what it did by
    itself, without a lock, and ``take`` adds it up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_Thread] = []
        self._tallies: list[Tally] = []
        self._with_spans = False
        self._begin_s = time.perf_counter()
        self._here = _Here(self._add_thread)

    def begin(self, *, with_spans: bool = False) -> None:
        """Forget what was measured."""
        with self._lock:
            self._with_spans = with_spans
            self._begin_s = time.perf_counter()
            for thread in self._threads:
                thread.forget(with_spans=with_spans)
            for tally in self._tallies:
                tally.busy_s = 0.0
                tally.spans = [] if with_spans else None

    def take(self) -> LaneTimes:
        """Measurements since ``begin``; goes on measuring."""
        busy_ms: dict[Lane, float] = {}
        stall_ms: dict[Lane, float] = {}
        found: list[Span] = []
        with self._lock:
            self._with_spans = False
            for thread in self._threads:
                for total_ms, seconds in ((busy_ms, thread.busy_s), (stall_ms, thread.stall_s)):
                    for lane, lane_s in list(seconds.items()):
                        total_ms[lane] = total_ms.get(lane, 0.0) + lane_s * 1000
                found += thread.take_spans(since_s=self._begin_s)
            for tally in self._tallies:
                for total_ms in (busy_ms, stall_ms) if tally.busy_s else ():
                    total_ms[tally.lane] = total_ms.get(tally.lane, 0.0) + tally.busy_s * 1000
                found += tally.take_spans(since_s=self._begin_s)
        return LaneTimes(
            busy_ms=busy_ms, stall_ms=stall_ms, spans=merge_spans(sorted(found, key=lambda span: span.begin_ms))
        )

    def enter_thread(self) -> None:
        """Say that this thread works beside compute: nothing stands still for what it does."""
        self._here.thread.is_beside = True

    def busy(self, lane: Lane) -> "_Timing":
        """The lane works; on compute's own thread compute stands still meanwhile. Of what is nested, each has its own time."""
        return _Timing(self._here.thread, lane, works=True)

    def waiting(self, lane: Lane) -> "_Timing":
        """Somebody waits for what the lane does elsewhere."""
        return _Timing(self._here.thread, lane, works=False)

    def tally(self, lane: Lane) -> "Tally":
        """For work that its own thread adds up by itself."""
        with self._lock:
            tally = Tally(lane, with_spans=self._with_spans)
            self._tallies.append(tally)
            return tally

    def _add_thread(self) -> "_Thread":
        with self._lock:
            thread = _Thread(with_spans=self._with_spans)
            self._threads.append(thread)
            return thread


class Tally:
    """A lane's work on compute's own threads since the clock began, nothing nested in it."""

    __slots__ = ("busy_s", "lane", "spans")

    def __init__(self, lane: Lane, *, with_spans: bool) -> None:
        self.lane = lane
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] | None = [] if with_spans else None
        """Begin and end of each; None: not asked for."""

    def take_spans(self, *, since_s: float) -> Iterator[Span]:
        """Spans that began then or later; no more are noted."""
        spans, self.spans = self.spans or [], None
        for begin_s, end_s in spans:
            yield _span(self.lane, begin_s, end_s, is_stall=True, since_s=since_s)


class _Thread:
    """The work of one thread since the clock began."""

    __slots__ = ("busy_s", "inner_s", "is_beside", "spans", "stall_s")

    def __init__(self, *, with_spans: bool) -> None:
        self.is_beside = False
        self.inner_s = 0.0
        """Milliseconds nested so far in the work that goes on."""
        self.forget(with_spans=with_spans)

    def forget(self, *, with_spans: bool) -> None:
        self.busy_s: dict[Lane, float] = {}
        self.stall_s: dict[Lane, float] = {}
        self.spans: list[tuple[Lane, float, float, bool]] | None = [] if with_spans else None

    def take_spans(self, *, since_s: float) -> Iterator[Span]:
        """Spans that began then or later; no more are noted."""
        spans, self.spans = self.spans or [], None
        for lane, begin_s, end_s, is_stall in spans:
            if begin_s >= since_s:
                yield _span(lane, begin_s, end_s, is_stall=is_stall, since_s=since_s)


def _span(lane: Lane, begin_s: float, end_s: float, *, is_stall: bool, since_s: float) -> Span:
    return Span(lane=lane, begin_ms=(begin_s - since_s) * 1000, end_ms=(end_s - since_s) * 1000, is_stall=is_stall)


class _Here(threading.local):
    """The thread that asks, as the clock knows it; made in each when it first asks."""

    def __init__(self, make: Callable[[], _Thread]) -> None:
        self.thread = make()


class _Timing:
    """A class, since a generator would cost each copy three times as much."""

    __slots__ = ("_begin_s", "_lane", "_outer_s", "_thread", "_works")

    def __init__(self, thread: _Thread, lane: Lane, *, works: bool) -> None:
        self._thread = thread
        self._lane = lane
        self._works = works

    def __enter__(self) -> None:
        thread = self._thread
        self._outer_s = thread.inner_s
        thread.inner_s = 0.0
        self._begin_s = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        end_s = time.perf_counter()
        thread, lane, begin_s = self._thread, self._lane, self._begin_s
        took_s = end_s - begin_s
        own_s = took_s - thread.inner_s
        thread.inner_s = self._outer_s + took_s
        works, is_stall = self._works, not thread.is_beside
        if works:
            thread.busy_s[lane] = thread.busy_s.get(lane, 0.0) + own_s
        if is_stall:
            thread.stall_s[lane] = thread.stall_s.get(lane, 0.0) + own_s
        if thread.spans is not None and (works or is_stall):
            thread.spans.append((lane, begin_s, end_s, is_stall))


_SEEN_BESIDE_A_CARD: tuple[Lane, ...] = ("host", "disk", "network")


def lane_fields(lanes: LaneTimes, *, total_ms: float, device: torch.device) -> dict[str, dict[Lane, float]]:
    """A telemetry record's times over ``total_ms``: ``lane_ms``, each lane's busy time; ``stall_ms``, compute's waits.

    Of a card neither compute nor copies nor what they wait for is seen here: only the other lanes are reported, and no stalls.
    """
    busy_ms = {lane: round(lane_ms, 3) for lane, lane_ms in lanes.busy_ms.items()}
    if device.type != "cpu":
        return {"lane_ms": {lane: busy_ms[lane] for lane in _SEEN_BESIDE_A_CARD if lane in busy_ms}}
    compute_ms = max(0.0, total_ms - sum(lanes.stall_ms.values()))
    return {
        "lane_ms": {"compute": round(compute_ms, 3), **busy_ms},
        "stall_ms": {lane: round(lane_ms, 3) for lane, lane_ms in lanes.stall_ms.items()},
    }


def span_rows(lanes: LaneTimes, *, device: torch.device) -> list[list[Any]]:
    """``spans`` of a telemetry record: ``[lane, begin_ms, end_ms, compute stands still]``; of a card again only what is seen."""
    is_seen = device.type == "cpu"
    return [
        [span.lane, round(span.begin_ms, 3), round(span.end_ms, 3), span.is_stall]
        for span in lanes.spans
        if is_seen or (span.lane in _SEEN_BESIDE_A_CARD and not span.is_stall)
    ]


def merge_spans(spans: list[Span], *, limit: int = MAX_SPANS) -> tuple[Span, ...]:
    """At most about ``limit``: neighbours on one lane and of one kind become one, the closest first."""
    gap_ms = 0.0
    while len(spans) > limit:
        gap_ms = max(gap_ms * 2, (spans[-1].end_ms - spans[0].begin_ms) / 10_000, 1e-6)
        spans = _joined(spans, gap_ms)
    return tuple(spans)


def _joined(spans: list[Span], gap_ms: float) -> list[Span]:
    rows: dict[tuple[Lane, bool], list[Span]] = {}
    for span in spans:
        row = rows.setdefault((span.lane, span.is_stall), [])
        if row and span.begin_ms - row[-1].end_ms <= gap_ms:
            last = row.pop()
            end_ms = max(last.end_ms, span.end_ms)
            span = Span(lane=span.lane, begin_ms=last.begin_ms, end_ms=end_ms, is_stall=span.is_stall)
        row.append(span)
    return sorted((span for row in rows.values() for span in row), key=lambda span: span.begin_ms)
