"""Measured times of steps, of ranks that share them or take several alone."""

import pytest

from optimizer.runtime.job.measured_steps import MeasuredSteps
from optimizer.runtime.meter.meter import Peak

PEAK = Peak(device_bytes=1, device_bytes_by_category={}, host_bytes=2, moment="forward")


def add(steps: MeasuredSteps, *step_ms: float, is_together: bool = True) -> None:
    for each_ms in step_ms:
        steps.add(each_ms, is_counted=False, peak=PEAK, disk_peak_bytes=0, is_together=is_together)
        steps.num_done += 1


def test_shared_steps_have_their_median() -> None:
    steps = MeasuredSteps()
    add(steps, 10.0, 11.0, 90.0)
    assert steps.measured.step_ms == 11.0
    assert not steps.can_be_probed
    add(steps, 12.0)
    assert steps.can_be_probed


def test_steps_alone_have_the_mean_over_a_round_of_medians() -> None:
    steps = MeasuredSteps(sync_every=4)
    add(steps, 10.0, 10.0, 11.0, is_together=False)
    assert steps.measured.step_ms == 10.0
    add(steps, 50.0)
    assert steps.measured.step_ms == pytest.approx((3 * 10.0 + 50.0) / 4)


def test_steps_alone_are_probed_once_ranks_were_brought_together() -> None:
    steps = MeasuredSteps(sync_every=32)
    add(steps, *[10.0] * 31, is_together=False)
    assert not steps.can_be_probed
    add(steps, 50.0)
    assert steps.can_be_probed
