"""Steps are counted at intervals, by a clock that the test sets."""

import itertools

import pytest

from optimizer.runtime.meter.counting import (
    COUNT_EVERY_S,
    MOST_BETWEEN_S,
    MOST_SHARE,
    NUM_FIRST_COUNTED,
    CountingPolicy,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("optimizer.runtime.meter.counting.time.monotonic", lambda: now[0])
    return now


def run(policy: CountingPolicy, clock: list[float], *, num_steps: int, step_s: float, counted_s: float) -> list[float]:
    """The times at which steps were counted, from the beginning."""
    start_s, counted = clock[0], []
    for index in range(num_steps):
        is_counted = policy.is_due(index)
        if is_counted:
            counted.append(clock[0] - start_s)
        took_s = counted_s if is_counted else step_s
        clock[0] += took_s
        policy.note(took_s, is_counted=is_counted)
    return counted


def test_the_first_steps_are_counted_and_one_in_ten_seconds(clock: list[float]) -> None:
    counted = run(CountingPolicy(), clock, num_steps=400, step_s=0.1, counted_s=0.1)
    assert len(counted[:NUM_FIRST_COUNTED]) == NUM_FIRST_COUNTED
    assert counted[NUM_FIRST_COUNTED - 1] < 1
    later = counted[NUM_FIRST_COUNTED:]
    assert all(COUNT_EVERY_S <= after - before <= COUNT_EVERY_S + 0.2 for before, after in itertools.pairwise(later))
    assert len(later) == 3


def test_counting_that_is_slow_is_done_more_rarely_and_takes_its_share_at_most(clock: list[float]) -> None:
    counted = run(CountingPolicy(), clock, num_steps=2000, step_s=0.1, counted_s=0.2)
    pauses = [after - before for before, after in itertools.pairwise(counted[3:])]
    assert all(pause >= 0.1 / MOST_SHARE for pause in pauses)
    assert pauses


def test_a_minute_never_passes_without_a_counted_step(clock: list[float]) -> None:
    counted = run(CountingPolicy(), clock, num_steps=4000, step_s=0.1, counted_s=5.0)
    pauses = [after - before for before, after in itertools.pairwise(counted[3:])]
    assert pauses
    assert max(pauses) <= MOST_BETWEEN_S + 5.2


def test_every_step_is_counted_where_that_is_asked_for(clock: list[float]) -> None:
    assert len(run(CountingPolicy(every_s=0), clock, num_steps=20, step_s=0.1, counted_s=0.9)) == 20


def test_the_last_one_is_counted_if_the_caller_says_so(clock: list[float]) -> None:
    policy = CountingPolicy()
    run(policy, clock, num_steps=10, step_s=0.1, counted_s=0.1)
    assert not policy.is_due(10)
    assert policy.is_due(11, is_last=True)
