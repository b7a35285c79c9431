"""Corrections that finished runs teach about a machine: a factor on each kind of time, and how far off its predictions are.

A calibration is the JSON object kept with the machine. Only time is scaled: peak bytes are arithmetic, and an error there is
to be seen and mended. Bytes that work was short of when it ran out of memory are kept beside (``estimate/job/shortfalls.py``).
All functions are pure; nothing here reads a clock or a file.

Each run says one thing: a measured step is the sum of its predicted kinds, each times a factor. A common factor is the
median of measured over predicted; each kind then may differ from it, drawn to it by a ridge, so that few runs move little
and many move the kinds in which they differ. Runs far off count less (Huber). The spread is that of runs left out of the fit
one by one.

Generations are fitted by themselves, under ``generations`` in the same object: a product of one token's rows or attention over a
cache is bound by other things than its kind in a step. Until one has finished, what steps taught is all that is known.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from optimizer.hardware.machine import Machine
from optimizer.hardware.rates import Rates
from optimizer.profile.time_kinds import KINDS, TimeKind, by_present_names

VERSION: Final = 2
"""Version of the stored object. One without a version holds a common factor alone (``step_time_factor``), and loads. So
does one whose kinds have names of before (``time_kinds.by_present_names``), and one that lacks a kind: its factor is
the common one."""
MAX_RUNS = 64
"""Runs that are kept, the latest; an old driver is forgotten with them."""
FACTOR_LIMITS = (0.1, 10.0)
"""A run measured further from its prediction was suspended or mis-measured; it teaches nothing."""
MIN_SPREAD_RUNS = 8
"""Number of finished runs from which on the interval's width is theirs."""
_KIND_LIMITS = (0.25, 4.0)
"""Limits of a kind's factor over the common one."""
_COMMON_PRIOR_RUNS = 0.1
"""The part of a run that it would take to say that nothing need be corrected: a probe of the same machine is rarely off
by half."""
_RIDGE = 0.1
"""Runs scatter by some 8 %, kinds of time differ from each other by some 25 %: the square of one over the other."""
_HUBER = 0.08
"""Relative error from which a run counts less than its square."""
_SPREAD_QUANTILE = 0.9
_MIN_SPREAD = 0.02
_UNPLACED = "unplaced"
"""Kind of a prediction that says only how long its step is."""
_DIGITS = 6
_GENERATIONS = "generations"
_TIME_ERROR = "step_time_mean_absolute_relative_error"


class PredictedRun(Protocol):
    """The part of a prediction that a run can check."""

    @property
    def device_peak_bytes(self) -> int: ...
    @property
    def step_ms(self) -> float: ...
    @property
    def exposed_by_kind_ms(self) -> Mapping[str, float]: ...
    @property
    def time_factors(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One finished run's step time."""

    predicted_ms: Mapping[str, float]
    """Milliseconds by kind that the step was to wait for, without any calibration."""
    measured_ms: float

    @classmethod
    def from_prediction(cls, prediction: PredictedRun, *, measured_ms: float, common_factor: float = 1.0) -> "TimedRun":
        """The run of a prediction and its measured time. common_factor: inside a prediction that names no kinds."""
        placed = prediction.exposed_by_kind_ms or {_UNPLACED: prediction.step_ms / common_factor}
        factors = prediction.time_factors
        bare = {kind: kind_ms / factors.get(kind, 1.0) for kind, kind_ms in placed.items()}
        return cls(
            predicted_ms=by_present_names(bare),
            measured_ms=measured_ms,
        )

    @property
    def total_ms(self) -> float:
        return sum(self.predicted_ms.values())

    @property
    def is_usable(self) -> bool:
        values = (*self.predicted_ms.values(), self.measured_ms)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not self.total_ms or not self.measured_ms:
            return False
        return FACTOR_LIMITS[0] <= self.measured_ms / self.total_ms <= FACTOR_LIMITS[1]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Error of predictions of runs that had no part in the calibration."""

    width: float
    """Relative; nine of ten were within."""
    num_runs: int


def fit_calibration(runs: Iterable[TimedRun]) -> dict[str, Any]:
    """The calibration that these runs alone give, in order of finishing; runs that cannot be are left out."""
    kept = [run for run in runs if run.is_usable]
    common, factors = _fit(kept)
    fitted: dict[str, Any] = {
        "version": VERSION,
        "step_time_factor": common,
        "time_factors": factors,
        "num_runs": len(kept),
        "runs": [_run_to_json(run) for run in kept[-MAX_RUNS:]],
    }
    if len(kept) >= MIN_SPREAD_RUNS:
        fitted["step_time_spread"] = _left_out_spread(kept)
        fitted["num_spread_runs"] = len(kept)
    return fitted


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
    applied_factor: the factor inside a prediction that names no kinds; the present one unless given.
    The errors are those of the predictions as they were shown, averaged over all runs.
    """
    before = dict(calibration or {})
    peak_error = _relative_error(prediction.device_peak_bytes, measured.get("device_peak_bytes"))
    time_error = _relative_error(prediction.step_ms, measured.get("step_ms"))
    if peak_error is None and time_error is None:
        return before
    after = dict(before)
    if time_error is not None:
        factor = step_time_factor(before) if applied_factor is None else applied_factor
        run = TimedRun.from_prediction(prediction, measured_ms=float(measured["step_ms"]), common_factor=factor)
        after |= fit_calibration([*_runs_of(before), run][-MAX_RUNS:])
    num_runs = int(before.get("num_runs", 0))
    return after | {
        "num_runs": num_runs + 1,
        "peak_mean_absolute_relative_error": _mean(before, "peak_mean_absolute_relative_error", num_runs, peak_error),
        _TIME_ERROR: _mean(before, _TIME_ERROR, num_runs, time_error),
    }


def of_generations(calibration: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A machine's calibration of generations: their own where one has finished, else that of training."""
    own: Mapping[str, Any] | None = (calibration or {}).get(_GENERATIONS)
    return own or calibration


def learn_generation(calibration: Mapping[str, Any] | None, run: TimedRun) -> dict[str, Any]:
    """The calibration after one more generation; the argument is left as it is, as it is for a run that teaches nothing.

    run: what it ran, priced by the machine's own rates (``estimate/generation/runs.py``). The error is that of the calibration
    until then.
    """
    before = dict(calibration or {})
    if not run.is_usable:
        return before
    factors: dict[str, float] = dict(read_time_factors(of_generations(before)).items())
    predicted_ms = sum(factors.get(kind, 1.0) * kind_ms for kind, kind_ms in run.predicted_ms.items())
    own: Mapping[str, Any] = before.get(_GENERATIONS, {})
    num_runs = int(own.get("num_runs", 0))
    error = _relative_error(predicted_ms, run.measured_ms)
    after = fit_calibration([*_runs_of(own), run][-MAX_RUNS:]) | {
        "num_runs": num_runs + 1,
        _TIME_ERROR: _mean(own, _TIME_ERROR, num_runs, error),
    }
    return before | {_GENERATIONS: after}


def step_time_factor(calibration: Mapping[str, Any] | None) -> float:
    """Measured over predicted step time on this machine, all kinds together; 1 without runs."""
    return float((calibration or {}).get("step_time_factor", 1.0))


def read_time_factors(calibration: Mapping[str, Any] | None) -> dict[TimeKind, float]:
    """Factors of time by kind, all of KINDS; empty where nothing is corrected."""
    common = step_time_factor(calibration)
    by_kind = by_present_names((calibration or {}).get("time_factors", {}))
    if not by_kind and common == 1.0:
        return {}
    return {kind: float(by_kind.get(kind, common)) for kind in KINDS}


def read_spread(calibration: Mapping[str, Any] | None) -> Spread | None:
    """The spread of finished runs; None where too few runs have finished."""
    stored = calibration or {}
    if "step_time_spread" not in stored:
        return None
    return Spread(width=float(stored["step_time_spread"]), num_runs=int(stored["num_spread_runs"]))


# Applying it.

_MAX_KEPT = 8


def calibrated_machine(machine: Machine, calibration: Mapping[str, Any] | None) -> Machine:
    """The machine with rates as finished runs have them; itself where nothing is corrected."""
    factors = read_time_factors(calibration)
    if not factors:
        return machine
    kept, key = machine.rates.corrected, tuple(factors.items())
    if key not in kept:
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        kept[key] = calibrated_rates(machine.rates, factors)
    return replace(machine, rates=kept[key])


def calibrated_rates(rates: Rates, factors: Mapping[TimeKind, float]) -> Rates:
    """Kinds of op keep their rates and a factor beside them (``Rates.time_factors``), the others get slower by theirs."""

    def slower(rate: float | None, kind: TimeKind) -> float | None:
        return None if rate is None else rate / factors.get(kind, 1.0)

    optimizers = rates.optimizer_elements_per_s
    return replace(
        rates,
        device_to_host_bytes_per_s=rates.device_to_host_bytes_per_s / factors.get("copy_out", 1.0),
        host_to_device_bytes_per_s=rates.host_to_device_bytes_per_s / factors.get("copy_in", 1.0),
        optimizer_elements_per_s={kind: rate / factors.get("optimizer", 1.0) for kind, rate in optimizers.items()},
        host_optimizer_elements_per_s=slower(rates.host_optimizer_elements_per_s, "host"),
        host_attention_curves={
            dtype: tuple((intensity, rate / factors.get("host", 1.0)) for intensity, rate in curve)
            for dtype, curve in rates.host_attention_curves.items()
        },
        disk_write_bytes_per_s=slower(rates.disk_write_bytes_per_s, "disk"),
        disk_read_bytes_per_s=slower(rates.disk_read_bytes_per_s, "disk"),
        disk_cached_read_bytes_per_s=slower(rates.disk_cached_read_bytes_per_s, "disk"),
        remote_write_bytes_per_s=slower(rates.remote_write_bytes_per_s, "network"),
        remote_read_bytes_per_s=slower(rates.remote_read_bytes_per_s, "network"),
        remote_round_trip_s=(rates.remote_round_trip_s or 0.0) * factors.get("network", 1.0) or None,
        fresh_bytes_per_s=slower(rates.fresh_bytes_per_s, "allocation"),
        time_factors={**rates.time_factors, **factors},
    )


# Fitting it.


def _fit(runs: Sequence[TimedRun]) -> tuple[float, dict[str, float]]:
    """The common factor, and each kind's."""
    if not runs:
        return 1.0, {}
    logs = [math.log(run.measured_ms / run.total_ms) for run in runs]
    common = math.exp(median(logs) * len(runs) / (len(runs) + _COMMON_PRIOR_RUNS))
    kinds = sorted({kind for run in runs for kind, kind_ms in run.predicted_ms.items() if kind_ms})
    shares = np.array([[run.predicted_ms.get(kind, 0.0) for kind in kinds] for run in runs])
    shares *= common / np.array([[run.measured_ms] for run in runs])
    above = _solve_ridge(shares, 1 - shares.sum(axis=1))
    low, high = _KIND_LIMITS
    factors = {
        kind: round(common * min(max(1 + more, low), high), _DIGITS) for kind, more in zip(kinds, above, strict=True)
    }
    return round(common, _DIGITS), factors


def _solve_ridge(shares: NDArray[np.float64], missing: NDArray[np.float64]) -> list[float]:
    """Additions to each kind's factor, so that the shares of a step that are missing come about; Huber's loss."""
    weights: NDArray[np.float64] = np.ones(len(missing))
    above: NDArray[np.floating] = np.zeros(shares.shape[1])
    for _ in range(20):
        weighted = shares * weights[:, None]
        above = np.linalg.solve(weighted.T @ shares + _RIDGE * np.eye(shares.shape[1]), weighted.T @ missing)
        residuals = np.abs(missing - shares @ above)
        weights = np.minimum(1.0, _HUBER / np.maximum(residuals, 1e-12)).astype(np.float64)
    return [float(more) for more in above]


def _left_out_spread(runs: Sequence[TimedRun]) -> float:
    errors = []
    for index, run in enumerate(runs):
        common, factors = _fit([*runs[:index], *runs[index + 1 :]])
        predicted_ms = sum(factors.get(kind, common) * kind_ms for kind, kind_ms in run.predicted_ms.items())
        errors.append(abs(run.measured_ms / predicted_ms - 1))
    return round(max(_MIN_SPREAD, float(np.quantile(errors, _SPREAD_QUANTILE))), _DIGITS)


# Keeping it.


def _run_to_json(run: TimedRun) -> dict[str, Any]:
    predicted_ms = {kind: float(f"{kind_ms:.5g}") for kind, kind_ms in run.predicted_ms.items() if kind_ms}
    return {"predicted_ms": predicted_ms, "measured_ms": float(f"{run.measured_ms:.5g}")}


def _runs_of(calibration: Mapping[str, Any]) -> list[TimedRun]:
    """Runs that a calibration remembers; of an object without a version, each ratio is a run of one kind."""
    if "version" not in calibration:
        ratios = calibration.get("recent_step_time_ratios", [])
        return [TimedRun(predicted_ms={_UNPLACED: 1.0}, measured_ms=float(ratio)) for ratio in ratios]
    return [
        TimedRun(predicted_ms=by_present_names(run["predicted_ms"]), measured_ms=float(run["measured_ms"]))
        for run in calibration.get("runs", [])
    ]


def _relative_error(predicted: float, measured: Any) -> float | None:
    usable = isinstance(measured, int | float) and math.isfinite(measured) and measured > 0 and predicted > 0
    return abs(predicted - measured) / measured if usable else None


def _mean(before: Mapping[str, Any], key: str, num_runs: int, error: float | None) -> float:
    mean = float(before.get(key, 0.0))
    return mean if error is None else mean + (error - mean) / (num_runs + 1)
