"""When a stage lets go of what it has sent: these moments are the bytes that it holds."""

from typing import Any, cast

import pytest
import torch

from optimizer.plan.devices.stages import SentAtOnce, deal_stages
from optimizer.runtime.ranks.group import PATIENCE_S, Arriving, Ranks
from optimizer.runtime.ranks.pipeline.link import PipelineLink


class Notes:
    """Stands for the ranks: notes which of what was sent is waited for."""

    def __init__(self) -> None:
        self.waited_for: list[int] = []
        self.patience_s: list[float] = []
        """That the process had, each time it waited until all was there."""
        self._num_sent = 0

    def open_ways(self, number: int) -> None:
        pass

    def settle(self, *, timeout_s: float) -> None:
        self.patience_s.append(timeout_s)

    def begin_sending_from_device(self, tensor: torch.Tensor, *, to: int, way: int) -> Arriving:
        index, self._num_sent = self._num_sent, self._num_sent + 1
        return Arriving(lambda: self.waited_for.append(index))

    def receive_on_device(self, tensor: torch.Tensor, *, source: int, way: int) -> None:
        pass


@pytest.fixture
def notes() -> Notes:
    return Notes()


def make_link(notes: Notes, *, at_once: SentAtOnce | None = None) -> PipelineLink:
    link = PipelineLink(cast(Ranks, notes), deal_stages((1, 1, 1), 3)[1])
    link.begin(at_once or SentAtOnce())
    return link


SOME: Any = torch.ones(3)


def test_hidden_states_are_let_go_of_before_one_more_is_held_than_may_be(notes: Notes) -> None:
    link = make_link(notes, at_once=SentAtOnce(hidden=2, gradients=1))
    for expected in ([], [], [0], [0, 1]):
        link.send_hidden(SOME)
        assert notes.waited_for == expected


def test_hidden_states_are_let_go_of_when_a_gradient_comes_from_where_they_went(notes: Notes) -> None:
    link = make_link(notes, at_once=SentAtOnce(hidden=3, gradients=1))
    link.send_hidden(SOME)
    link.send_hidden(SOME)
    link.receive_hidden(SOME)
    assert notes.waited_for == []
    link.receive_gradient(SOME)
    assert notes.waited_for == [0, 1]


def test_a_gradient_is_let_go_of_when_hidden_states_come_from_where_it_went(notes: Notes) -> None:
    link = make_link(notes)
    link.send_gradient(SOME)
    link.receive_gradient(SOME)
    assert notes.waited_for == []
    link.receive_hidden(SOME)
    assert notes.waited_for == [0]


def test_gradients_that_come_round_later_are_held_until_there_are_too_many(notes: Notes) -> None:
    link = make_link(notes, at_once=SentAtOnce(hidden=1, gradients=2))
    for expected in ([], [], [0]):
        link.send_gradient(SOME)
        link.receive_hidden(SOME)
        assert notes.waited_for == expected


def test_nothing_is_held_at_the_end_of_a_step(notes: Notes) -> None:
    link = make_link(notes, at_once=SentAtOnce(hidden=2, gradients=2))
    link.send_hidden(SOME)
    link.send_gradient(SOME)
    link.finish()
    assert notes.waited_for == [0, 1]


def test_the_process_waits_for_other_stages_with_patience_before_a_step_ends(notes: Notes) -> None:
    make_link(notes).finish()
    assert notes.patience_s == [PATIENCE_S]
