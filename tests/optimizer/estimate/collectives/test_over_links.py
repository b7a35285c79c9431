"""Collectives by the clock, on links with a rate and a delay."""

import pytest

from optimizer.estimate.collectives.gloo import Call, Collective
from optimizer.estimate.collectives.over_links import simulate_seconds
from optimizer.hardware.machine import PeerLink

FAST = PeerLink(kind="network", bytes_per_s=1e15, latency_s=0.02, source="table")
"""A link so fast that nothing but its delay is felt."""
MIB = 1 << 20


def seconds(collective: Collective, num_bytes: int, num_ranks: int, *, link: PeerLink = FAST, times: int = 1) -> float:
    call = Call(collective=collective, num_bytes=num_bytes)
    return simulate_seconds((call,) * times, num_ranks, link)


@pytest.mark.parametrize(
    ("collective", "num_ranks", "round_trips"),
    [
        ("barrier", 2, 1), ("barrier", 3, 2), ("barrier", 4, 2),
        ("all_reduce", 2, 2), ("all_reduce", 3, 4), ("all_reduce", 4, 6),
        ("reduce", 2, 2), ("reduce", 3, 3), ("reduce", 4, 4),
        ("broadcast", 2, 1), ("broadcast", 4, 1.5),
    ],
)  # fmt: skip
def test_small_messages_cost_round_trips(collective: Collective, num_ranks: int, round_trips: float) -> None:
    """The notice of the second receiver in a tree comes while the first is served."""
    assert seconds(collective, 1000, num_ranks) == pytest.approx(round_trips * 0.04, rel=0.01)


def test_two_segments_under_way_do_not_fill_a_long_link() -> None:
    """Each segment of 1 MiB waits for a notice that comes after another segment: about a delay for each, in both rounds."""
    link = PeerLink(kind="network", bytes_per_s=25e6, latency_s=0.02, source="table")
    found, carried = seconds("all_reduce", 16 * MIB, 2, link=link), 16 * MIB / 25e6
    assert found == pytest.approx(carried + 16 * 0.02, rel=0.05)
    assert seconds("broadcast", 16 * MIB, 2, link=link) == pytest.approx(carried + 0.04, rel=0.01)


def test_a_root_that_serves_two_shares_its_link_between_them() -> None:
    link = PeerLink(kind="network", bytes_per_s=25e6, latency_s=0.001, source="table")
    one, all_three = (seconds("broadcast", 4 * MIB, num_ranks, link=link) for num_ranks in (2, 4))
    assert all_three > 2.5 * one


def test_an_owner_goes_on_before_the_others_have_what_it_sent() -> None:
    alone, together = seconds("broadcast", 1000, 4), seconds("broadcast", 1000, 4, times=10)
    assert 5 * alone < together < 10 * alone


def test_a_rank_alone_takes_no_time() -> None:
    assert seconds("all_reduce", MIB, 1) == 0.0
