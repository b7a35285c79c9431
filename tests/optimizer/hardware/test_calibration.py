"""What runs teach: a factor that settles, and errors that are told."""

from dataclasses import dataclass

import pytest

from optimizer.hardware.calibration import (
    FACTOR_LIMITS,
    MAX_RECENT_RATIOS,
    step_time_factor,
    update_calibration,
)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    device_peak_bytes: int = 1000
    step_ms: float = 100.0


def run_many(calibration, ratios, *, applied=None):
    for ratio in ratios:
        measured = {"device_peak_bytes": 1000, "step_ms": 100.0 * ratio}
        calibration = update_calibration(calibration, prediction=Predicted(), measured=measured, applied_factor=applied)
    return calibration


def test_a_machine_without_runs_has_factor_one():
    assert step_time_factor({}) == 1.0
    assert step_time_factor(None) == 1.0


def test_one_run_sets_the_factor_and_both_errors():
    after = update_calibration({}, prediction=Predicted(), measured={"device_peak_bytes": 800, "step_ms": 125.0})
    assert after["step_time_factor"] == 1.25
    assert after["num_runs"] == 1
    assert after["peak_mean_absolute_relative_error"] == pytest.approx(0.25)
    assert after["step_time_mean_absolute_relative_error"] == pytest.approx(0.2)


def test_the_argument_is_left_as_it_was():
    before = run_many({}, [1.1])
    copy = {key: list(value) if isinstance(value, list) else value for key, value in before.items()}
    run_many(before, [2.0])
    assert before == copy


def test_a_prediction_that_was_already_corrected_is_not_corrected_again():
    """The machine takes 1.5 times as long; once predictions say so, the factor stays."""
    calibration = run_many({}, [1.5])
    corrected = Predicted(step_ms=150.0)
    for _ in range(5):
        calibration = update_calibration(
            calibration, prediction=corrected, measured={"device_peak_bytes": 1000, "step_ms": 150.0}
        )
    assert calibration["step_time_factor"] == pytest.approx(1.5)


def test_the_factor_inside_an_older_prediction_can_be_given():
    calibration = run_many({}, [1.5, 1.5, 1.5], applied=1.0)
    assert calibration["step_time_factor"] == 1.5


def test_a_few_wild_runs_do_not_move_the_factor():
    calibration = run_many({}, [1.2, 1.2, 1.2, 1.2, 50.0, 1.2, 0.001], applied=1.0)
    assert calibration["step_time_factor"] == pytest.approx(1.2)
    assert max(calibration["recent_step_time_ratios"]) == FACTOR_LIMITS[1]
    assert min(calibration["recent_step_time_ratios"]) == FACTOR_LIMITS[0]


def test_old_runs_are_forgotten():
    calibration = run_many({}, [2.0] * MAX_RECENT_RATIOS + [1.0] * (MAX_RECENT_RATIOS // 2 + 1), applied=1.0)
    assert calibration["step_time_factor"] == 1.0
    assert len(calibration["recent_step_time_ratios"]) == MAX_RECENT_RATIOS
    assert calibration["num_runs"] == MAX_RECENT_RATIOS + MAX_RECENT_RATIOS // 2 + 1


def test_errors_are_averaged_over_all_runs():
    calibration = run_many({}, [1.25, 1.0], applied=1.0)
    assert calibration["step_time_mean_absolute_relative_error"] == pytest.approx(0.1)
    assert calibration["peak_mean_absolute_relative_error"] == 0.0


@pytest.mark.parametrize("measured", [{}, {"step_ms": None}, {"step_ms": 0.0}, {"step_ms": float("nan")}])
def test_a_run_without_numbers_is_not_counted(measured):
    before = run_many({}, [1.3])
    assert update_calibration(before, prediction=Predicted(), measured=measured) == before


def test_a_run_with_a_peak_only_leaves_the_factor():
    before = run_many({}, [1.3])
    after = update_calibration(before, prediction=Predicted(), measured={"device_peak_bytes": 2000})
    assert after["step_time_factor"] == before["step_time_factor"]
    assert after["peak_mean_absolute_relative_error"] == pytest.approx(0.25)
