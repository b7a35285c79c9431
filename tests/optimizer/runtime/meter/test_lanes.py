"""The clock of the lanes: who was busy, what compute stood still for, and when."""

import threading

import pytest
import torch

from optimizer.runtime.meter.lanes import LaneClock, LaneTimes, Span, lane_fields, merge_spans, span_rows


class Now:
    """A clock that goes on when the test advances it."""

    s = 0.0

    def advance(self, ms: int) -> None:
        self.s += ms / 1000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    """The clock of the lanes."""
    clock = Now()
    monkeypatch.setattr("optimizer.runtime.meter.lanes.time.perf_counter", lambda: clock.s)
    return clock


@pytest.fixture
def lanes(now: Now) -> LaneClock:
    return LaneClock()


def test_compute_stands_still_for_what_its_own_thread_does(now: Now, lanes: LaneClock) -> None:
    with lanes.busy("copy_out"):
        now.advance(3)
    found = lanes.take()
    assert found.busy_ms == found.stall_ms == {"copy_out": pytest.approx(3)}


def test_work_on_a_thread_beside_compute_stalls_nobody(now: Now, lanes: LaneClock) -> None:
    def work() -> None:
        lanes.enter_thread()
        with lanes.busy("disk"):
            now.advance(5)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    found = lanes.take()
    assert found.busy_ms == pytest.approx({"disk": 5})
    assert (found.stall_ms, found.spans) == ({}, ())


def test_waiting_is_a_stall_and_no_work(now: Now, lanes: LaneClock) -> None:
    with lanes.waiting("disk"):
        now.advance(2)
    found = lanes.take()
    assert found.stall_ms == pytest.approx({"disk": 2})
    assert (found.busy_ms, found.spans) == ({}, ())


def test_nested_spans_count_once_each_as_their_own(now: Now, lanes: LaneClock) -> None:
    with lanes.busy("host"):
        now.advance(4)
        with lanes.busy("copy_in"):
            now.advance(1)
    assert lanes.take().stall_ms == {"host": pytest.approx(4), "copy_in": pytest.approx(1)}


def test_spans_are_recorded_with_times_only_if_asked_for(now: Now, lanes: LaneClock) -> None:
    lanes.begin(with_spans=True)
    now.advance(10)
    with lanes.busy("copy_in"):
        now.advance(2)
    (span,) = lanes.take().spans
    assert (span.lane, span.is_stall) == ("copy_in", True)
    assert (span.begin_ms, span.end_ms) == pytest.approx((10, 12))
    lanes.begin()
    with lanes.busy("copy_in"):
        now.advance(2)
    assert lanes.take().spans == ()


def test_a_tally_is_reported_with_the_rest_and_starts_anew_with_it(now: Now, lanes: LaneClock) -> None:
    tally = lanes.tally("copy_in")
    lanes.begin(with_spans=True)
    now.advance(1)
    with lanes.busy("copy_in"):
        now.advance(2)
    tally.busy_s += 0.003
    tally.spans.append((now.s + 0.001, now.s + 0.004))
    times = lanes.take()
    assert times.busy_ms == times.stall_ms == {"copy_in": pytest.approx(5)}
    assert [span.begin_ms for span in times.spans] == pytest.approx([1, 4])
    assert all(span.is_stall for span in times.spans)
    assert tally.spans is None
    lanes.begin()
    assert lanes.take() == LaneTimes()


def test_a_new_step_starts_from_nothing(now: Now, lanes: LaneClock) -> None:
    with lanes.busy("host"):
        now.advance(1)
    lanes.begin()
    assert lanes.take() == LaneTimes()


def test_many_spans_become_few_without_losing_their_ends_or_their_lanes() -> None:
    spans = [
        Span(lane=("copy_in", "copy_out")[index % 2], begin_ms=index, end_ms=index + 0.5, is_stall=True) for index in range(5000)
    ]
    found = merge_spans(spans, limit=100)
    assert len(found) <= 100
    assert {span.lane for span in found} == {"copy_in", "copy_out"}
    assert (found[0].begin_ms, max(span.end_ms for span in found)) == (0, 4999.5)


def test_compute_is_busy_for_the_time_that_it_does_not_stall() -> None:
    times = LaneTimes(busy_ms={"copy_in": 3.0, "disk": 9.0}, stall_ms={"copy_in": 3.0, "disk": 1.0})
    assert lane_fields(times, total_ms=20.0, device=torch.device("cpu")) == {
        "lane_ms": {"compute": 16.0, "copy_in": 3.0, "disk": 9.0},
        "stall_ms": {"copy_in": 3.0, "disk": 1.0},
    }


def test_a_card_reports_only_what_this_process_can_see() -> None:
    times = LaneTimes(busy_ms={"copy_in": 3.0, "host": 2.0}, stall_ms={"host": 1.0})
    assert lane_fields(times, total_ms=20.0, device=torch.device("cuda")) == {"lane_ms": {"host": 2.0}}


def test_spans_of_a_card_are_those_of_threads_beside_it() -> None:
    spans = [
        Span(lane="disk", begin_ms=1, end_ms=2.0004, is_stall=False),
        Span(lane="host", begin_ms=2, end_ms=3, is_stall=True),
        Span(lane="copy_in", begin_ms=3, end_ms=4, is_stall=False),
    ]
    times = LaneTimes(spans=tuple(spans))
    assert span_rows(times, device=torch.device("cuda")) == [["disk", 1, 2.0, False]]
    assert [row[0] for row in span_rows(times, device=torch.device("cpu"))] == ["disk", "host", "copy_in"]
