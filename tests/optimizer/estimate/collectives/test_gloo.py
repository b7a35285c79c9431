"""The sends and receives that gloo's collectives are made of, and the bytes that leave each rank."""

import pytest

from optimizer.estimate.collectives.framing import ETHERNET, Frame, count_framed_bytes
from optimizer.estimate.collectives.gloo import Call, Collective, count_sent_bytes, list_actions

MIB = 1 << 20
NOTES = 3 * 48
"""Notices and the preamble of one message, of both sides together."""


def total(call: Call, num_ranks: int) -> int:
    return sum(count_sent_bytes(call, num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_an_all_reduce_goes_around_twice_in_two_segments_for_each_rank(num_ranks: int) -> None:
    size, others = 48_000, num_ranks - 1
    messages = 2 * others * 2 * num_ranks
    assert total(Call(collective="all_reduce", num_bytes=size), num_ranks) == 2 * others * size + NOTES * messages


def test_larger_tensors_go_in_segments_of_at_most_a_mebibyte() -> None:
    assert total(Call(collective="all_reduce", num_bytes=16 * MIB), 2) == 2 * 16 * MIB + NOTES * 2 * 16


def test_a_few_numbers_leave_segments_empty_which_are_not_sent() -> None:
    one_number_each = Call(collective="all_reduce", num_bytes=16, element_bytes=8)
    assert total(one_number_each, 2) == 2 * (16 + 2 * NOTES)
    assert count_sent_bytes(Call(collective="all_reduce"), 2) == (0, 0)


def test_a_reduce_ends_with_a_gathering_on_the_owner() -> None:
    call = Call(collective="reduce", num_bytes=48_000, owner=1)
    ring, gathered = 2 * 48_000 + 12 * NOTES, 2 * 16_000 + 2 * NOTES
    assert total(call, 3) == ring + gathered
    sent = count_sent_bytes(call, 3)
    assert sent[0] == sent[2] == sent[1] + 16_000 + 2 * 48 - 2 * 48


def test_a_reduce_of_large_tensors_sends_more_than_its_owner_needs() -> None:
    call = Call(collective="reduce", num_bytes=16 * MIB)
    assert total(call, 2) == 2 * 14 * MIB + 28 * NOTES + 8 * MIB + NOTES


@pytest.mark.parametrize(("num_ranks", "by_owner"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_broadcast_is_a_tree_from_its_owner(num_ranks: int, by_owner: int) -> None:
    call = Call(collective="broadcast", num_bytes=10_000, owner=1)
    assert total(call, num_ranks) == (num_ranks - 1) * (10_000 + NOTES)
    assert count_sent_bytes(call, num_ranks)[1] == by_owner * (10_000 + 96)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast", "barrier"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("num_bytes", [8, 1000, 5 * MIB + 12])
def test_every_send_meets_a_receive_of_its_size(collective: Collective, num_ranks: int, num_bytes: int) -> None:
    call = Call(collective=collective, num_bytes=num_bytes, owner=num_ranks - 1)
    sent, received = [], []
    for rank in range(num_ranks):
        for what, peer, size in list_actions(call, rank, num_ranks):
            if what == "send":
                sent.append((rank, peer, size))
            elif what == "receive":
                received.append((peer, rank, size))
    assert sent
    assert sorted(sent) == sorted(received)


def test_frames_add_headers_and_acknowledgements() -> None:
    call = Call(collective="broadcast", num_bytes=14_480 - 48)
    owner, other = count_framed_bytes(call, 2, ETHERNET)
    assert owner == 48 + 14_480 + (1 + 10) * 66
    assert other == 48 + (1 + 5) * 66
    without = Frame(content_bytes=1 << 30, header_bytes=0, acknowledged=0)
    assert count_framed_bytes(call, 2, without) == count_sent_bytes(call, 2)
