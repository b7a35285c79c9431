"""Long searches take turns: few at once, one to a person, whoever asks how much."""

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.worker.processes import wait_for
from webapp.accounts import turns
from webapp.accounts.errors import SearchesBusy
from webapp.accounts.turns import MAX_OF_PERSON, Turns, asked_by, hurry, take_turn

MANY = MAX_OF_PERSON - 1


class Crowd:
    """Threads that each hold a turn until they are let go."""

    def __init__(self, own: Turns) -> None:
        self._turns = own
        self._may_go = threading.Event()
        self._threads: list[threading.Thread] = []
        self.begun: list[int] = []

    def ask(self, person: int) -> None:
        self._threads.append(threading.Thread(target=self._hold, args=(person,)))
        self._threads[-1].start()

    def _hold(self, person: int) -> None:
        with self._turns.take(person):
            self.begun.append(person)
            self._may_go.wait(20)

    def let_go(self) -> None:
        self._may_go.set()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture
def own() -> Turns:
    return Turns()


@pytest.fixture
def crowd(own: Turns) -> Any:
    made = Crowd(own)
    yield made
    made.let_go()


def test_who_asks_much_leaves_a_turn_to_others(own: Turns, crowd: Crowd) -> None:
    for _ in range(MANY):
        crowd.ask(1)
    wait_for(lambda: crowd.begun == [1], what="the first of many questions")
    with own.take(2):
        assert crowd.begun == [1]
    crowd.let_go()
    assert crowd.begun == [1] * MANY


def test_whoever_waited_longest_comes_next(own: Turns, crowd: Crowd) -> None:
    crowd.ask(1)
    wait_for(lambda: crowd.begun == [1], what="one at work")
    crowd.ask(2)
    wait_for(lambda: crowd.begun == [1, 2], what="two at work")
    for person in (1, 1, 2, 3):
        crowd.ask(person)
        time.sleep(0.05)  # they are to come one after the other
    crowd.let_go()
    assert crowd.begun[:3] == [1, 2, 3]
    assert sorted(crowd.begun) == [1, 1, 1, 2, 2, 3]


def test_more_than_a_person_may_have_are_refused_at_once(own: Turns, crowd: Crowd) -> None:
    for _ in range(MAX_OF_PERSON):
        crowd.ask(1)
    wait_for(lambda: own._num_of(1) == MAX_OF_PERSON, what="as many as there may be")
    began_s = time.monotonic()
    with pytest.raises(SearchesBusy, match="8 questions of yours are being answered or wait for it, so this one"), own.take(1):
        pass
    assert time.monotonic() - began_s < 1


def test_nobody_waits_longer_than_a_while(own: Turns, crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WAIT_S", 0.1)
    for person in (1, 2):
        crowd.ask(person)
    wait_for(lambda: len(crowd.begun) == 2, what="two at work")
    with pytest.raises(SearchesBusy, match="2 questions are being answered, as many as go at once"), own.take(3):
        pass
    with pytest.raises(SearchesBusy, match="another question of yours is being answered"), own.take(1, own_wait_s=0.1):
        pass
    crowd.let_go()
    with ExitStack() as held:  # who gave up stands in nobody's way
        held.enter_context(own.take(3))
        held.enter_context(own.take(1))


def test_a_submission_waits_for_the_same_person_s_questions_but_a_moment(
    monkeypatch: pytest.MonkeyPatch, crowd: Crowd, own: Turns
) -> None:
    monkeypatch.setattr(turns, "_turns", own)
    crowd.ask(1)
    wait_for(lambda: crowd.begun == [1], what="a question")
    began_s = time.monotonic()
    with asked_by(lambda: 1):
        hurry()
        with pytest.raises(SearchesBusy), take_turn():
            pass
    assert time.monotonic() - began_s < turns.WAIT_S / 2


def test_a_turn_within_a_turn_is_the_same_and_a_thread_without_a_request_takes_none(
    monkeypatch: pytest.MonkeyPatch, own: Turns
) -> None:
    monkeypatch.setattr(turns, "_turns", own)
    with asked_by(lambda: 1), take_turn(), take_turn():
        assert own._num_of(1) == 1
    assert own._num_of(1) == 0
    with ExitStack() as held:
        for _ in range(MAX_OF_PERSON + 1):
            held.enter_context(take_turn())
