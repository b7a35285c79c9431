"""Shares of a step: the slowest rank is done as soon as by any shares, for times of every kind."""

import itertools
import math
import random

import pytest

from optimizer.search.questions.uneven.shares import TimeOf, share_out


def time_with(shares: list[list[int]], time_of: TimeOf) -> float:
    return max(time_of(kind, share) for kind, row in enumerate(shares) for share in row)


def best_of_all(total: int, counts: list[int], time_of: TimeOf) -> float:
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    splits = itertools.product(range(1, total), repeat=len(kinds))
    return min(
        max(time_of(kind, share) for kind, share in zip(kinds, split, strict=True)) for split in splits if sum(split) == total
    )


def test_shares_are_in_proportion_to_speed() -> None:
    speeds = (3.0, 1.0)
    assert share_out(20, counts=[1, 2], time_of=lambda kind, size: size / speeds[kind]) == [[12], [4, 4]]


def test_all_sequences_are_dealt_out_where_they_do_not_divide() -> None:
    shares = share_out(17, counts=[2, 2], time_of=lambda kind, size: size * (1 + kind))
    assert shares is not None
    assert sum(map(sum, shares)) == 17
    assert time_with(shares, lambda kind, size: size * (1 + kind)) == 6


@pytest.mark.parametrize("seed", range(20))
def test_no_shares_are_quicker_where_times_rise(seed: int) -> None:
    draws = random.Random(seed)
    counts = draws.choice([[1, 1], [1, 2], [2, 1], [1, 1, 1]])
    per_sequence, start = [draws.uniform(1, 9) for _ in counts], [draws.uniform(0, 5) for _ in counts]

    def time_of(kind: int, size: int) -> float:
        return start[kind] + per_sequence[kind] * size

    total = draws.randint(sum(counts), 12)
    shares = share_out(total, counts=counts, time_of=time_of)
    assert shares is not None
    assert time_with(shares, time_of) == pytest.approx(best_of_all(total, counts, time_of))


def test_a_device_that_has_no_room_for_its_part_gets_less() -> None:
    """The fast one fits two sequences at most."""
    shares = share_out(8, counts=[1, 1], time_of=lambda kind, size: math.inf if kind == 0 and size > 2 else size * (1.0 + kind))
    assert shares == [[2], [6]]


@pytest.mark.parametrize(
    ("total", "largest"),
    [(2, 9), (9, 2)],
    ids=["fewer-sequences-than-ranks", "no-room"],
)
def test_shares_that_cannot_be_are_none(total: int, largest: int) -> None:
    assert share_out(total, counts=[1, 2], time_of=lambda kind, size: size if size <= largest else math.inf) is None


def test_shares_that_are_too_long_in_any_case_are_not_timed() -> None:
    asked: set[tuple[int, int]] = set()

    def time_of(kind: int, size: int) -> float:
        asked.add((kind, size))
        return float(size * (1, 7)[kind])

    def least_of(kind: int, size: int) -> float:
        return float(size * (1, 7)[kind])

    plain = share_out(40, counts=[2, 2], time_of=time_of)
    without = set(asked)
    asked.clear()
    assert share_out(40, counts=[2, 2], time_of=time_of, least_of=least_of) == plain
    assert asked < without
