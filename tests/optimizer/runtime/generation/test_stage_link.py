"""When a stage of a generation waits until its tokens and its wish to stop are taken."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from optimizer.plan.devices.stages import list_stages
from optimizer.runtime.generation.stages.link import StageLink
from optimizer.runtime.ranks.group import Ranks

TOKENS = torch.tensor([3, 4])


class Notes:
    """Stands for the ranks: notes which of the numbers that were sent are waited for."""

    def __init__(self) -> None:
        self.waited_for: list[tuple[int, list[int]]] = []

    def open_ways(self, number: int) -> None:
        assert number == 1

    def begin_sending(self, integers: Sequence[int], *, to: int, tag: int) -> Any:
        return _Sent(self.waited_for, (to, list(integers)))


class _Sent:
    def __init__(self, waited_for: list[tuple[int, list[int]]], what: tuple[int, list[int]]) -> None:
        self._waited_for, self._what = waited_for, what

    def wait(self) -> None:
        self._waited_for.append(self._what)


@pytest.fixture
def notes() -> Notes:
    return Notes()


def test_a_micro_batchs_tokens_are_taken_before_its_next_ones_are_sent(notes: Notes) -> None:
    link = StageLink(cast(Ranks, notes), list_stages((1, 1, 1))[2])
    link.send_tokens(0, TOKENS)
    link.send_tokens(1, TOKENS)
    assert notes.waited_for == []
    link.send_tokens(0, TOKENS + 2)
    assert notes.waited_for == [(0, [3, 4]), (1, [3, 4])]


def test_a_wish_is_taken_before_the_next_one_is_sent(notes: Notes) -> None:
    link = StageLink(cast(Ranks, notes), list_stages((1, 1))[0])
    link.stops(lambda: False)
    assert notes.waited_for == []
    link.stops(lambda: True)
    assert notes.waited_for == [(1, [0])]


def test_everything_is_taken_at_the_end_of_a_pass(notes: Notes) -> None:
    first, last = (StageLink(cast(Ranks, notes), stage) for stage in list_stages((1, 1)))
    first.stops(lambda: True)
    first.finish()
    assert notes.waited_for == [(1, [1])]
    last.send_tokens(0, TOKENS)
    last.send_tokens(1, TOKENS)
    last.finish()
    assert notes.waited_for[1:] == [(0, [3, 4]), (0, [3, 4])]
