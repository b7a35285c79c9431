"""What finished runs teach about a machine: one factor on time, and how far off its predictions have been.

A calibration is the JSON object kept with the machine. Only time is corrected: peak bytes are arithmetic, and an error
there is to be seen and mended, not scaled away. All functions are pure; nothing here reads a clock or a file.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol, TypedDict

MAX_RECENT_RATIOS = 31
"""Runs that vote on the factor. A median of 31 forgets an old driver after 16 new runs and shrugs off 15 bad ones."""
FACTOR_LIMITS = (0.1, 10.0)
"""A ratio outside is a run that was suspended or mis-measured, not a slow machine; it is counted as the limit."""


class Calibration(TypedDict, total=False):
    """What the machine's row holds. An empty object is a machine without runs."""

    step_time_factor: float
    num_runs: int
    peak_mean_absolute_relative_error: float
    step_time_mean_absolute_relative_error: float
    recent_step_time_ratios: list[float]


class PredictedRun(Protocol):
    """The part of a prediction that a run can check."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def step_ms(self) -> float: ...


def step_time_factor(calibration: Mapping[str, Any] | None) -> float:
    """Measured over predicted step time on this machine; 1 without runs."""
    return float((calibration or {}).get("step_time_factor", 1.0))


def update_calibration(
    calibration: Mapping[str, Any] | None,
    *,
    prediction: PredictedRun,
    measured: Mapping[str, Any],
    applied_factor: float | None = None,
) -> dict[str, Any]:
    """The calibration after one more run; the argument is left as it is.

    measured: ``device_peak_bytes`` and ``step_ms`` of the run's result. A missing or unusable number leaves its part unchanged;
    a run with neither is not counted.
    applied_factor: the factor inside ``prediction.step_ms``; the present one unless given. The ratio that is remembered is
    measured over uncalibrated time, so a correction is not corrected again.
    The errors are those of the predictions as they were shown, averaged over all runs.
    """
    before = dict(calibration or {})
    num_runs = int(before.get("num_runs", 0))
    peak_error = _relative_error(prediction.device_peak_bytes, measured.get("device_peak_bytes"))
    time_error = _relative_error(prediction.step_ms, measured.get("step_ms"))
    if peak_error is None and time_error is None:
        return before
    ratios = [float(ratio) for ratio in before.get("recent_step_time_ratios", [])]
    if time_error is not None:
        factor = step_time_factor(before) if applied_factor is None else applied_factor
        ratios.append(_clipped(float(measured["step_ms"]) / prediction.step_ms * factor))
    ratios = ratios[-MAX_RECENT_RATIOS:]
    after: Calibration = {
        "step_time_factor": median(ratios) if ratios else 1.0,
        "num_runs": num_runs + 1,
        "recent_step_time_ratios": ratios,
        "peak_mean_absolute_relative_error": _mean(before, "peak_mean_absolute_relative_error", num_runs, peak_error),
        "step_time_mean_absolute_relative_error": _mean(
            before, "step_time_mean_absolute_relative_error", num_runs, time_error
        ),
    }
    return before | after


def _relative_error(predicted: float, measured: Any) -> float | None:
    usable = isinstance(measured, int | float) and math.isfinite(measured) and measured > 0 and predicted > 0
    return abs(predicted - measured) / measured if usable else None


def _clipped(ratio: float) -> float:
    low, high = FACTOR_LIMITS
    return min(max(ratio, low), high)


def _mean(before: Mapping[str, Any], key: str, num_runs: int, error: float | None) -> float:
    mean = float(before.get(key, 0.0))
    return mean if error is None else mean + (error - mean) / (num_runs + 1)
