"""Few numbers stand for all between them: sums over straight lines are exact."""

import pytest

from optimizer.estimate.bounds.evenly_spaced import evenly_spaced, sum_shares


@pytest.mark.parametrize(("low", "high", "count"), [(1, 1, 3), (0, 7, 2), (3, 90, 9), (5, 6, 4)])
def test_both_ends_are_among_the_few(low: int, high: int, count: int) -> None:
    places = evenly_spaced(low, high, count)
    assert places[0] == low
    assert places[-1] == high
    assert len(places) <= count
    assert places == sorted(set(places))


def test_where_there_is_no_number_none_stands_for_it() -> None:
    assert evenly_spaced(2, 1, 5) == []
    assert sum_shares([]) == []


@pytest.mark.parametrize("places", [[4], [1, 2], [0, 3, 10], [2, 3, 4, 50]])
def test_the_shares_of_few_sum_a_straight_line_over_all(places: list[int]) -> None:
    whole = sum(7 * number + 3 for number in range(places[0], places[-1] + 1))
    assert sum(share * (7 * place + 3) for place, share in sum_shares(places)) == pytest.approx(whole)
