"""Devices on which several jobs in a row met a fault of the machine rest for a while."""

from collections.abc import Sequence

import pytest

from worker.run.watch.faults import HOST, MAX_JOBS, MAX_REST_S, REST_S, FaultWatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> FaultWatch:
    return FaultWatch(now_s=clock)


def meet(watch: FaultWatch, *job_ids: str, places: Sequence[int] = (0,)) -> None:
    for job_id in job_ids:
        watch.note_fault(job_id, places=places)


def test_several_jobs_in_a_row_let_their_device_rest_and_no_other(watch: FaultWatch) -> None:
    meet(watch, "a", "b", places=[1])
    assert watch.resting() == frozenset()
    meet(watch, "c", places=[1])
    assert watch.resting() == {1}


def test_one_job_alone_says_nothing_of_the_device(watch: FaultWatch) -> None:
    meet(watch, *["a"] * (MAX_JOBS + 3))
    assert watch.resting() == frozenset()


def test_one_that_ends_well_ends_the_row(watch: FaultWatch) -> None:
    meet(watch, "a", "b")
    watch.note_success(places=[0])
    meet(watch, "c", "d")
    assert watch.resting() == frozenset()


def test_rests_grow_up_to_a_limit_until_one_ends_well(watch: FaultWatch, clock: Clock) -> None:
    meet(watch, "a", "b", "c")
    rests_s = []
    for _ in range(7):
        began_s = clock.now_s
        while watch.resting():
            clock.now_s += REST_S
        rests_s.append(clock.now_s - began_s)
        meet(watch, "a")
    assert rests_s == [30, 60, 120, 240, 480, MAX_REST_S, MAX_REST_S]
    watch.note_success(places=[0])
    assert watch.resting() == frozenset()


def test_those_that_began_before_a_rest_do_not_lengthen_it(watch: FaultWatch, clock: Clock) -> None:
    meet(watch, "a", "b", "c", "d", "e")
    clock.now_s += REST_S
    assert watch.resting() == frozenset()


def test_what_needs_no_device_counts_by_itself(watch: FaultWatch) -> None:
    meet(watch, "a", "b", "c", places=[HOST])
    assert watch.resting() == {HOST}
