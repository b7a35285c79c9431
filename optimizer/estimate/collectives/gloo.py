"""The sends and receives of each rank that gloo's collectives are made of, and the bytes that they take. Torch-free.

Read from gloo's sources, as torch 2.13 builds them: ``allreduce.cc`` (a ring in segments of at most 1 MiB, at least two for each
rank, two of them under way), ``reduce.cc`` (the same ring, then each rank sends the owner its part; the ring runs on for tensors
of more segments than two for each rank, so that they send more than they need), ``broadcast.cc`` (a binomial tree, each tensor in
one piece), ``barrier.cc`` (dissemination, messages without content).

A message needs three preambles (``transport/tcp/pair.h``): the sender's and the receiver's notice that they are ready, and one
before the content. Content leaves when the receiver's notice has come, so each message takes a round trip and more.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple

PREAMBLE_BYTES: Final = 48
"""Six 64-bit numbers; two before content and one back for every message."""
_SEGMENT_BYTES: Final = 1 << 20
_UNDER_WAY: Final = 2

Collective = Literal["all_reduce", "reduce", "broadcast", "barrier"]


class Action(NamedTuple):
    """One thing that a rank does; ``wait_`` blocks until one more of those it began is done."""

    what: Literal["send", "receive", "wait_send", "wait_receive"]
    peer: int = -1
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective of all ranks."""

    collective: Collective
    num_bytes: int = 0
    element_bytes: int = 4
    owner: int = 0
    """The rank that has or gets the tensor; of no effect in an all-reduce and a barrier."""


@lru_cache(maxsize=4096)
def count_sent_bytes(call: Call, num_ranks: int) -> tuple[int, ...]:
    """By rank: bytes that it gives to its connections, preambles among them, before TCP's and other headers."""
    sent = [0] * num_ranks
    for rank in range(num_ranks):
        for action, times in Counter(list_actions(call, rank, num_ranks)).items():
            if action.what == "send":
                sent[rank] += times * (action.num_bytes + 2 * PREAMBLE_BYTES)
            elif action.what == "receive":
                sent[rank] += times * PREAMBLE_BYTES
    return tuple(sent)


def list_actions(call: Call, rank: int, num_ranks: int) -> Iterator[Action]:
    """In order, for one rank. Nothing for a tensor without elements or a rank alone."""
    if num_ranks == 1 or (not call.num_bytes and call.collective != "barrier"):
        return iter(())
    if call.collective == "all_reduce":
        return _all_reduce(call, rank, num_ranks)
    if call.collective == "reduce":
        return _reduce(call, rank, num_ranks)
    if call.collective == "broadcast":
        return _broadcast(call, rank, num_ranks)
    return _barrier(rank, num_ranks)


class _Segments(NamedTuple):
    """A tensor cut into equal segments but for the last ones, as many for each rank."""

    num_bytes: int
    per_rank: int
    segment_bytes: int

    def size_of(self, index: int, num_ranks: int) -> int:
        """Bytes of a segment, counted around the ring; 0 beyond the tensor's end."""
        start = index % (self.per_rank * num_ranks) * self.segment_bytes
        return max(0, min(self.segment_bytes, self.num_bytes - start))


def _cut(call: Call, num_ranks: int) -> _Segments:
    most_bytes = _SEGMENT_BYTES // call.element_bytes * call.element_bytes
    number = max(-(-call.num_bytes // most_bytes), _UNDER_WAY * num_ranks)
    per_rank = -(-number // num_ranks)
    segment_bytes = _round_up(-(-call.num_bytes // (per_rank * num_ranks)), call.element_bytes)
    return _Segments(call.num_bytes, per_rank, segment_bytes)


def _cut_for_reduce(call: Call, num_ranks: int) -> _Segments:
    least = _UNDER_WAY * num_ranks
    most_bytes = _SEGMENT_BYTES // call.element_bytes * call.element_bytes
    segment_bytes = _round_up(min(-(-call.num_bytes // least), most_bytes), call.element_bytes)
    per_rank = -(-max(-(-call.num_bytes // segment_bytes), least) // num_ranks)
    return _Segments(call.num_bytes, per_rank, segment_bytes)


def _all_reduce(call: Call, rank: int, num_ranks: int) -> Iterator[Action]:
    cut = _cut(call, num_ranks)
    count = cut.per_rank * (num_ranks - 1)
    yield from _ring(cut, rank, num_ranks, first=rank + 1, count=count)
    yield from _ring(cut, rank, num_ranks, first=rank, count=count)


def _reduce(call: Call, rank: int, num_ranks: int) -> Iterator[Action]:
    cut = _cut_for_reduce(call, num_ranks)
    yield from _ring(cut, rank, num_ranks, first=rank + 1, count=cut.per_rank * num_ranks - _UNDER_WAY)
    chunk_bytes = cut.per_rank * cut.segment_bytes
    chunks = [max(0, min(chunk_bytes, call.num_bytes - other * chunk_bytes)) for other in range(num_ranks)]
    if rank != call.owner:
        if chunks[rank]:
            yield Action("send", call.owner, chunks[rank])
            yield Action("wait_send")
        return
    others = [other for other in range(num_ranks) if other != rank and chunks[other]]
    yield from (Action("receive", other, chunks[other]) for other in others)
    yield from (Action("wait_receive") for _ in others)


def _ring(cut: _Segments, rank: int, num_ranks: int, *, first: int, count: int) -> Iterator[Action]:
    """Segments to the rank before, from chunk ``first`` on, while those one chunk further come from the rank after."""
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks

    def sizes(step: int) -> tuple[int, int]:
        index = first * cut.per_rank + step
        return cut.size_of(index, num_ranks), cut.size_of(index + cut.per_rank, num_ranks)

    for step in range(count + _UNDER_WAY):
        if step >= _UNDER_WAY:
            sent, received = sizes(step - _UNDER_WAY)
            if received:
                yield Action("wait_receive")
            if sent:
                yield Action("wait_send")
        if step < count:
            sent, received = sizes(step)
            if received:
                yield Action("receive", after, received)
            if sent:
                yield Action("send", before, sent)


def _broadcast(call: Call, rank: int, num_ranks: int) -> Iterator[Action]:
    place, num_sends = (rank - call.owner) % num_ranks, 0
    for bit in range((num_ranks - 1).bit_length()):
        if place >> (bit + 1):
            continue
        other = place ^ (1 << bit)
        if other >= num_ranks:
            continue
        peer = (other + call.owner) % num_ranks
        if place >> bit & 1:
            yield Action("receive", peer, call.num_bytes)
            yield Action("wait_receive")
        else:
            yield Action("send", peer, call.num_bytes)
            num_sends += 1
    yield from (Action("wait_send") for _ in range(num_sends))


def _barrier(rank: int, num_ranks: int) -> Iterator[Action]:
    distance = 1
    while distance < num_ranks:
        yield Action("receive", (rank - distance) % num_ranks)
        yield Action("send", (rank + distance) % num_ranks)
        yield Action("wait_receive")
        yield Action("wait_send")
        distance *= 2


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
