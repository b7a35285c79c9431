"""The lease's renewal, and what is heard with it."""

import sqlite3
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from django.db import OperationalError

from tests.worker.processes import wait_for
from worker.heartbeat import Heartbeat
from worker.run.watch.lifeline import boot_s


@dataclass(frozen=True, kw_only=True)
class Answer:
    held: bool = True
    cancel_mode: str = ""
    pause_requested: bool = False
    drains: bool = False


def heartbeat(
    *answers: Any, asked_s: float | None = None, lease_s: float = 30, interval_s: float = 0.01, outage_s: float = 60.0
) -> Heartbeat:
    """A heartbeat that hears these answers in turn, the last one for ever; an exception is raised. asked_s: now unless given."""
    remaining = list(answers)

    def renew() -> Answer:
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked_s = boot_s() if asked_s is None else asked_s
    return Heartbeat(renew, asked_s=asked_s, lease_s=lease_s, interval_s=interval_s, outage_s=outage_s)


def test_requests_are_heard_with_the_renewal() -> None:
    heart = heartbeat(Answer(cancel_mode="save", pause_requested=True))
    heart.beat()
    assert (heart.cancel_mode, heart.pause_requested, heart.is_fenced_out) == ("save", True, False)


def test_a_lost_lease_fences_the_attempt_out_for_good() -> None:
    heart = heartbeat(Answer(held=False), Answer(held=True))
    heart.beat()
    heart.beat()
    assert heart.is_fenced_out


def test_an_absent_database_is_borne_with() -> None:
    heart = heartbeat(OperationalError("down"), Answer(cancel_mode="discard"))
    heart.beat()
    assert not heart.is_fenced_out
    heart.beat()
    assert heart.cancel_mode == "discard"


def test_a_database_that_stays_away_too_long_ends_the_attempt() -> None:
    heart = heartbeat(OperationalError("down"), outage_s=-1.0)
    heart.beat()
    assert heart.is_fenced_out


def test_it_beats_on_its_own_while_the_attempt_is_busy() -> None:
    beats = []

    def renew() -> Answer:
        beats.append(1)
        return Answer()

    heart = Heartbeat(renew, asked_s=boot_s(), lease_s=30, interval_s=0.01, outage_s=60)
    heart.start()
    wait_for(lambda: len(beats) >= 3, what="three renewals")
    heart.stop()
    assert not heart.is_fenced_out


def test_an_attempt_may_work_almost_until_its_lease_ends_as_counted_from_the_question() -> None:
    heart = heartbeat(Answer())
    before_s = boot_s()
    heart.beat()
    assert before_s + 27 <= heart.work_until_s() <= boot_s() + 27


def test_an_attempt_without_a_lease_may_not_work() -> None:
    heart = heartbeat(Answer(held=False))
    heart.beat()
    assert heart.work_until_s() < boot_s()


class Clock:
    """Stands for ``boot_s``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ticking = Clock()
    monkeypatch.setattr("worker.heartbeat.boot_s", ticking)
    return ticking


def look_for(heart: Heartbeat, clock: Clock, seconds: int) -> float:
    """Ask once a second until when the attempt may work; the last answer."""
    for _ in range(seconds):
        clock.now_s += 1
        until_s = heart.work_until_s()
    return until_s


def test_an_attempt_goes_on_while_the_database_is_away_but_not_for_ever(clock: Clock) -> None:
    heart = heartbeat(OperationalError("down"), asked_s=clock.now_s, lease_s=30, outage_s=60.0)
    heart.beat()
    assert look_for(heart, clock, 50) == clock.now_s + 10
    assert look_for(heart, clock, 11) == 0.0


def locked(cause: Exception, **facts: object) -> OperationalError:
    for name, value in facts.items():
        setattr(cause, name, value)
    error = OperationalError("locked")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        locked(sqlite3.OperationalError("database is locked"), sqlite_errorcode=sqlite3.SQLITE_BUSY_SNAPSHOT),
        locked(psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")),
    ],
)
def test_who_waits_for_a_lock_may_work_no_longer_than_its_lease_since_others_may_claim(
    clock: Clock, error: OperationalError
) -> None:
    heart = heartbeat(error, Answer(), asked_s=clock.now_s, lease_s=30, outage_s=600.0)
    assert look_for(heart, clock, 40) == 1000.0 + 27  # the renewal is still under way
    heart.beat()
    assert heart.work_until_s() == 1000.0 + 27
    heart.beat()
    assert heart.work_until_s() == clock.now_s + 27


def test_who_was_halted_between_the_claim_and_the_start_may_not_work(clock: Clock) -> None:
    heart = heartbeat(Answer(), asked_s=clock.now_s - 40, lease_s=30, outage_s=600.0)
    assert look_for(heart, clock, 5) < clock.now_s
    heart.beat()
    assert heart.work_until_s() == clock.now_s + 27


def test_who_was_halted_within_the_claim_asks_before_it_begins(clock: Clock) -> None:
    heart = heartbeat(Answer(), asked_s=clock.now_s - 40, lease_s=30, interval_s=5.0)
    heart.start()
    assert heart.work_until_s() == clock.now_s + 27
    heart.stop()


def test_who_was_halted_may_work_no_longer_than_its_lease_until_the_database_has_said_so(clock: Clock) -> None:
    heart = heartbeat(Answer(), asked_s=clock.now_s, lease_s=30, outage_s=600.0)
    heart.beat()
    clock.now_s += 40  # another may have claimed meanwhile
    assert heart.work_until_s() == 1000.0 + 27
    assert look_for(heart, clock, 5) == 1000.0 + 27
    heart.beat()
    assert heart.work_until_s() == clock.now_s + 27
