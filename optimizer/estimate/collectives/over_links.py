"""Runs gloo's collectives over links by the clock: seconds until every rank has what it needs. Torch-free.

Each rank has an access link that carries one message after the other at the link's rate, in both directions at once; between two
ranks lies a delay. Notices of readiness queue behind the content that a rank sends, as they do in its kernel's and its link's
queue, which is what keeps gloo's two segments under way from filling a long link.

*Not modelled*: TCP's windows, taken to have grown; sums of segments, which a measured rate holds; ranks that start apart.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from typing import Any, Final, Literal, NamedTuple

from optimizer.estimate.collectives.gloo import PREAMBLE_BYTES, Action, Call, list_actions
from optimizer.hardware.machine import PeerLink

_READY, _CONTENT = 0, 1
"""Kinds of messages; at the same moment notices are dealt with first."""
_TURN_BYTES: Final = 1 << 20
"""Content to several ranks shares a link in turns of this size, about what TCP's windows let a connection put before the link."""
_WAKE_S: Final = 20e-6
"""Assumed: from what has come to what a rank does next; content that became free at the same moment leaves before it."""


class _Event(NamedTuple):
    """Sorted by time: a sender's link is free, a message reaches the receiver's link, a message is there, or a rank goes on."""

    at_s: float
    kind: int
    number: int
    what: Literal["leaves", "comes", "is there", "goes on"]
    rank: int
    message: "_Message | None" = None


@dataclass
class _Message:
    kind: int
    source: int
    target: int
    num_bytes: int
    left_bytes: int
    """Bytes that have yet to enter the sender's link."""


@lru_cache(maxsize=4096)
def simulate_seconds(calls: tuple[Call, ...], num_ranks: int, link: PeerLink) -> float:
    """Seconds of the collectives one after the other, from a common start to the end of the last rank."""
    programs = [chain.from_iterable([list_actions(call, rank, num_ranks) for call in calls]) for rank in range(num_ranks)]
    return _Clock(programs, link).run()


@dataclass
class _Rank:
    actions: Iterator[Action]
    now_s: float = 0.0
    is_sending: bool = False
    in_free_s: float = 0.0
    blocked_on: str = ""
    out: deque[_Message] = field(default_factory=deque)
    """Messages before this rank's link."""
    done: dict[str, int] = field(default_factory=lambda: {"send": 0, "receive": 0})
    """Sends and receives that are over and were not waited for yet."""
    ready: dict[int, int] = field(default_factory=dict)
    """By peer: its receives that no send of this rank has met yet."""
    pending: dict[int, deque[int]] = field(default_factory=dict)
    """By peer: bytes of sends that wait for its notice."""


class _Clock:
    def __init__(self, programs: Sequence[Iterator[Action]], link: PeerLink) -> None:
        self._ranks = [_Rank(actions) for actions in programs]
        self._link = link
        self._number = count()
        self._events: list[_Event] = []

    def run(self) -> float:
        for rank in range(len(self._ranks)):
            self._go_on(rank, 0.0)
        while self._events:
            event = heapq.heappop(self._events)
            if event.what == "goes on":
                self._go_on(event.rank, event.at_s)
            elif event.what == "leaves":
                self._leave(event)
            elif event.what == "comes":
                self._come(event)
            else:
                self._arrive(event)
        return max(rank.now_s for rank in self._ranks)

    # What ranks do.

    def _go_on(self, number: int, now_s: float) -> None:
        """Let a rank act until it has to wait."""
        rank = self._ranks[number]
        rank.now_s = now_s
        for action in rank.actions:
            if action.what == "receive":
                self._send_out(number, action.peer, PREAMBLE_BYTES, now_s, kind=_READY)
            elif action.what == "send":
                rank.pending.setdefault(action.peer, deque()).append(action.num_bytes)
                if rank.ready.get(action.peer, 0):
                    rank.ready[action.peer] -= 1
                    self._release(number, action.peer, now_s)
            else:
                kind = action.what.removeprefix("wait_")
                if not rank.done[kind]:
                    rank.blocked_on = kind
                    return
                rank.done[kind] -= 1

    def _release(self, number: int, peer: int, now_s: float) -> None:
        """Send the first content that waits for a peer; a send is over once the system has it."""
        num_bytes = 2 * PREAMBLE_BYTES + self._ranks[number].pending[peer].popleft()
        self._send_out(number, peer, num_bytes, now_s, kind=_CONTENT)
        self._finish(number, "send", now_s)

    def _finish(self, number: int, kind: str, now_s: float) -> None:
        rank = self._ranks[number]
        if rank.blocked_on == kind:
            rank.blocked_on = ""
            self._add(now_s + _WAKE_S, _CONTENT, "goes on", number)
        else:
            rank.done[kind] += 1

    # What links do.

    def _send_out(self, source: int, target: int, num_bytes: int, now_s: float, *, kind: int) -> None:
        rank = self._ranks[source]
        rank.out.append(_Message(kind, source, target, num_bytes, num_bytes))
        if not rank.is_sending:
            self._serve(source, now_s)

    def _serve(self, number: int, now_s: float) -> None:
        """Put the first message, or a turn's bytes of it, on a rank's link."""
        rank = self._ranks[number]
        rank.is_sending = bool(rank.out)
        if not rank.out:
            return
        message = rank.out.popleft()
        turn_bytes = min(message.left_bytes, _TURN_BYTES)
        if message.left_bytes < 2 * _TURN_BYTES and not any(other.kind == _CONTENT for other in rank.out):
            turn_bytes = message.left_bytes
        message.left_bytes -= turn_bytes
        self._add(now_s + self._seconds_of(turn_bytes), message.kind, "leaves", number, message)

    def _leave(self, event: _Event) -> None:
        message, rank = event.message, self._ranks[event.rank]
        assert message is not None
        if message.left_bytes:
            rank.out.append(message)
        else:
            self._add(event.at_s + self._link.latency_s, message.kind, "comes", message.target, message)
        self._serve(event.rank, event.at_s)

    def _come(self, event: _Event) -> None:
        """Pass through the receiver's link, which carries a message while it comes unless another is before it."""
        rank, message = self._ranks[event.rank], event.message
        assert message is not None
        rank.in_free_s = max(event.at_s, rank.in_free_s + self._seconds_of(message.num_bytes))
        self._add(rank.in_free_s, message.kind, "is there", event.rank, message)

    def _arrive(self, event: _Event) -> None:
        rank, message = self._ranks[event.rank], event.message
        assert message is not None
        if message.kind == _CONTENT:
            self._finish(event.rank, "receive", event.at_s)
        elif rank.pending.get(message.source):
            self._release(event.rank, message.source, event.at_s)
        else:
            rank.ready[message.source] = rank.ready.get(message.source, 0) + 1

    def _add(self, at_s: float, kind: int, what: Any, rank: int, message: _Message | None = None) -> None:
        heapq.heappush(self._events, _Event(at_s, kind, next(self._number), what, rank, message))

    def _seconds_of(self, num_bytes: int) -> float:
        return num_bytes / self._link.bytes_per_s
