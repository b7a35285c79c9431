"""Deals a step's sequences out to unequal devices so that the slowest of them is done soonest, for any times.

Shares in proportion to speed first, then sequences go from the slowest rank to another as long as that makes the whole quicker.
Where times rise with every sequence the result is the best there is but for rounding of the start; they do not quite, since 7
sequences may need smaller micro-batches than 8, so moves of several are tried too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

TimeOf = Callable[[int, int], float]
"""Milliseconds of a step by kind of device and number of sequences; infinite where nothing fits."""
_MOVES: Final = (1, 2, 4)
_MOST_MOVES: Final = 8
"""Moves for each rank."""


def share_out(
    total: int, *, counts: Sequence[int], time_of: TimeOf, least_of: TimeOf = lambda _kind, _size: 0.0
) -> list[list[int]] | None:
    """By kind, the sequences of each of its ranks, which all have one or more; None where no such shares fit.

    counts: ranks of each kind. least_of: what no step takes less than, which is known sooner than what it takes.
    """
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    shares = _first_shares(total, kinds, time_of)
    if shares is None:
        return None
    for _ in range(_MOST_MOVES * len(kinds)):
        better = _better(shares, kinds, time_of, least_of)
        if better is None:
            break
        shares = better
    if not all(map(math.isfinite, _times(shares, kinds, time_of))):
        return None
    return [[share for share, of in zip(shares, kinds, strict=True) if of == kind] for kind in range(len(counts))]


def first_ms(total: int, *, counts: Sequence[int], time_of: TimeOf) -> float:
    """Milliseconds of the shares that ``share_out`` begins with; infinite where none fit."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    shares = _first_shares(total, kinds, time_of)
    return math.inf if shares is None else max(_times(shares, kinds, time_of))


def _first_shares(total: int, kinds: Sequence[int], time_of: TimeOf) -> list[int] | None:
    """Shares by speed that add up; None where some device has no room for any."""
    shares = _proportional(total, kinds, time_of) if total >= len(kinds) else None
    if shares is not None:
        _adjust(total, shares, kinds, time_of)
    return shares


def _proportional(total: int, kinds: Sequence[int], time_of: TimeOf) -> list[int] | None:
    speeds: dict[int, float] = {}
    for kind in dict.fromkeys(kinds):
        for size in dict.fromkeys((total // len(kinds), 1)):
            if math.isfinite(time_of(kind, size)):
                speeds[kind] = size / time_of(kind, size)
                break
        else:
            return None
    whole = sum(speeds[kind] for kind in kinds)
    return [max(1, int(total * speeds[kind] / whole)) for kind in kinds]


def _adjust(total: int, shares: list[int], kinds: Sequence[int], time_of: TimeOf) -> None:
    """Give or take single sequences until all are dealt out."""
    ranks = range(len(shares))
    while sum(shares) < total:
        shares[min(ranks, key=lambda rank: time_of(kinds[rank], shares[rank] + 1))] += 1
    while sum(shares) > total:
        able = [rank for rank in ranks if shares[rank] > 1]
        shares[max(able, key=lambda rank: time_of(kinds[rank], shares[rank]))] -= 1


def _better(shares: list[int], kinds: Sequence[int], time_of: TimeOf, least_of: TimeOf) -> list[int] | None:
    """The best that one move from the slowest rank can make of the shares; None where no move helps."""
    times = _times(shares, kinds, time_of)
    slowest, found, least = times.index(max(times)), None, sorted(times, reverse=True)
    tried: set[tuple[int, int, int]] = set()
    for size in _MOVES:
        for rank, kind in enumerate(kinds):
            alike = (kind, shares[rank], size)
            if rank == slowest or shares[slowest] <= size or alike in tried:
                continue
            tried.add(alike)
            if least_of(kind, shares[rank] + size) > times[slowest] or time_of(kind, shares[rank] + size) > times[slowest]:
                continue
            moved = list(shares)
            moved[slowest], moved[rank] = moved[slowest] - size, moved[rank] + size
            ordered = sorted(_times(moved, kinds, time_of), reverse=True)
            if ordered < least:
                found, least = moved, ordered
    return found


def _times(shares: Sequence[int], kinds: Sequence[int], time_of: TimeOf) -> list[float]:
    return [time_of(kind, share) for kind, share in zip(kinds, shares, strict=True)]
