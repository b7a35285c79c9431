"""The schedule of stages, run: what is known of pipelines in closed form, and the waits that slow links add."""

from itertools import pairwise
from typing import Any

import pytest

from optimizer.estimate.step.pipeline.schedule import RanStep, StageTimes, run_schedule
from optimizer.plan.devices.stages import deal_stages

FORWARD_MS, BACKWARD_MS = 3.0, 5.0


def run(
    times: list[tuple[float, float]],
    *,
    num_micro_batches: int,
    schedule: Any = "1f1b",
    crossing_ms: float = 0.0,
    notice_ms: float = 0.0,
    num_rounds: int = 1,
) -> RanStep:
    return run_schedule(
        [StageTimes(forward_ms=forward, backward_ms=back, accumulate_ms=back) for forward, back in times],
        ranks=deal_stages((1,) * len(times) * num_rounds, len(times)),
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        crossing_ms=crossing_ms,
        notice_ms=notice_ms,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 33])
def test_equal_stages_take_as_long_as_the_formula_says(schedule: Any, num_stages: int, num_micro_batches: int) -> None:
    ran = run([(FORWARD_MS, BACKWARD_MS)] * num_stages, num_micro_batches=num_micro_batches, schedule=schedule)
    assert ran.total_ms == pytest.approx((num_micro_batches + num_stages - 1) * (FORWARD_MS + BACKWARD_MS))


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_rounds", [1, 2, 3, 5])
def test_devices_with_several_stages_never_wait_for_each_other_and_idle_once_for_all_rounds(
    num_devices: int, num_rounds: int
) -> None:
    for num_micro_batches in (1, 2, 3, 4, 5, 6, 8, 13, 16, 33):
        times = [(FORWARD_MS, BACKWARD_MS)] * num_devices
        ran = run(times, num_micro_batches=num_micro_batches, num_rounds=num_rounds, schedule="breadth_first")
        if num_micro_batches >= num_devices:
            turns = num_rounds * num_micro_batches + num_devices - 1
            assert ran.total_ms == pytest.approx(turns * (FORWARD_MS + BACKWARD_MS))


def test_the_slowest_stage_sets_the_pace() -> None:
    ran = run([(1.0, 2.0), (4.0, 6.0), (1.0, 2.0)], num_micro_batches=20)
    assert ran.total_ms == pytest.approx(20 * 10.0 + 3.0)


def test_a_step_is_what_each_stage_computes_and_what_it_waits() -> None:
    times = [(1.0, 2.5), (2.0, 3.0), (1.5, 1.0), (0.5, 4.0)]
    ran = run(times, num_micro_batches=7, crossing_ms=0.75)
    for (forward, back), waited_ms in zip(times, ran.waited_ms, strict=True):
        assert 7 * (forward + back) + sum(waited_ms) == pytest.approx(ran.total_ms)
        assert min(waited_ms) >= 0


def test_a_slower_link_never_makes_a_step_shorter_and_more_micro_batches_then_cost() -> None:
    spans = [run([(1.0, 2.0)] * 4, num_micro_batches=8, crossing_ms=ms).total_ms for ms in (0.0, 0.5, 1.0, 5.0)]
    assert all(before < after for before, after in pairwise(spans))
    few, many = (run([(8.0 / m, 16.0 / m)] * 4, num_micro_batches=m, crossing_ms=10.0).total_ms for m in (4, 32))
    assert few < many


def test_what_crosses_once_is_waited_for_once_each_way() -> None:
    assert run([(1.0, 2.0)] * 2, num_micro_batches=1, crossing_ms=4.0).total_ms == pytest.approx(2 * 3.0 + 2 * 4.0)


def test_a_receiver_that_waits_has_said_so_before_and_a_late_one_is_waited_for() -> None:
    """Hidden states leave once the receiver's notice is there: the first at 10 ms though they are ready at 1, the gradient with
    the sender.
    """
    ran = run([(1.0, 2.0), (20.0, 40.0)], num_micro_batches=1, crossing_ms=4.0, notice_ms=10.0)
    assert ran.total_ms == pytest.approx(10.0 + 4.0 + 60.0 + 4.0 + 2.0)
    late = run([(1.0, 2.0), (0.0, 0.0)], num_micro_batches=1, crossing_ms=4.0, notice_ms=10.0)
    # The gradient is ready at 14, but the first stage asked for it at 1 and its notice came at 11.
    assert late.total_ms == pytest.approx(10.0 + 4.0 + 4.0 + 2.0)
