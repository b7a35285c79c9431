"""Finds the replica that a rank shares in: with whom it shares out state, gradients and weights, and who owns the same elsewhere.

Without several replicas all ranks are one. Nothing is allocated but what another group of ranks takes (``group.py``).
"""

from dataclasses import dataclass

from optimizer.plan.devices.layout import DeviceLayout
from optimizer.runtime.ranks.group import Ranks


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One rank's replica."""

    ranks: Ranks
    """Those that share it, numbered by their places in it."""
    twins: Ranks | None
    """The ranks at this one's place in all replicas, in their order; None where there is one replica."""


def find_replica(ranks: Ranks, layout: DeviceLayout) -> Replica:
    """The replica of this rank; asked for by all ranks together. Raises RankLost."""
    if layout.replicas == 1:
        return Replica(ranks=ranks, twins=None)
    size, place = layout.num_sharing, layout.place_of(ranks.rank)
    first = ranks.rank - place
    return Replica(
        ranks=ranks.among(range(first, first + size)),
        twins=ranks.among(range(place, ranks.num_ranks, size)) if layout.shares_state else None,
    )
