"""Few of many whole numbers that stand for all, and how many each of them counts for. Torch-free."""

from collections.abc import Sequence
from itertools import pairwise


def evenly_spaced(low: int, high: int, count: int) -> list[int]:
    """At most so many whole numbers from ``low`` to ``high``, both among them; none where ``high`` is lower."""
    if high < low:
        return []
    return sorted({low + (high - low) * place // (count - 1) for place in range(count)})


def sum_shares(places: Sequence[int]) -> list[tuple[int, float]]:
    """The number of whole numbers for which each place counts in the sum over all, where values lie on straight lines
    between places.
    """
    shares = dict.fromkeys(places, 0.0)
    for low, high in pairwise(places):
        shares[low] += (high - low + 1) / 2
        shares[high] += (high - low - 1) / 2
    if places:
        shares[places[-1]] += 1
    return list(shares.items())
