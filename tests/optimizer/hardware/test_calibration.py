"""Finished runs correct predictions: factors settle, kinds of plans are kept apart, and errors are reported."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.hardware.calibration import (
    MAX_RUNS,
    MIN_SPREAD_RUNS,
    TimedRun,
    calibrated_machine,
    fit_calibration,
    learn_generation,
    of_generations,
    read_spread,
    read_time_factors,
    step_time_factor,
    update_calibration,
)
from optimizer.profile.time_kinds import KINDS


@dataclass(frozen=True, kw_only=True)
class Predicted:
    device_peak_bytes: int = 1000
    step_ms: float = 100.0
    exposed_by_kind_ms: dict = field(default_factory=dict)
    time_factors: dict = field(default_factory=dict)


def run_many(calibration: dict[str, Any], ratios: list[float], *, applied: Any = None) -> dict[str, Any]:
    for ratio in ratios:
        measured = {"device_peak_bytes": 1000, "step_ms": 100.0 * ratio}
        calibration = update_calibration(calibration, prediction=Predicted(), measured=measured, applied_factor=applied)
    return calibration


TRUE_FACTORS = {"matmul": 1.3, "elementwise": 0.8, "dispatch": 1.6, "copy_out": 2.0}


def make_runs(
    number: int, *, noise: float = 0.0, seed: int = 0, factors: dict[str, Any] = TRUE_FACTORS
) -> list[TimedRun]:
    """Steps in which each kind takes its factor times what was predicted, with relative noise."""
    chance = random.Random(seed)
    runs = []
    for _ in range(number):
        predicted_ms = {kind: chance.uniform(1, 100) for kind in factors}
        true_ms = sum(factors[kind] * kind_ms for kind, kind_ms in predicted_ms.items())
        runs.append(TimedRun(predicted_ms=predicted_ms, measured_ms=true_ms * (1 + chance.gauss(0, noise))))
    return runs


def predict_ms(calibration: dict[str, Any], run: TimedRun) -> float:
    factors: dict[Any, float] = read_time_factors(calibration)
    return sum(factors[kind] * kind_ms for kind, kind_ms in run.predicted_ms.items())


def test_a_machine_without_runs_has_factor_one() -> None:
    assert step_time_factor({}) == 1.0
    assert step_time_factor(None) == 1.0
    assert read_time_factors({}) == {}
    assert read_spread({}) is None


def test_one_run_nearly_sets_the_factor_of_every_kind() -> None:
    after = update_calibration({}, prediction=Predicted(), measured={"device_peak_bytes": 800, "step_ms": 125.0})
    assert after["step_time_factor"] == pytest.approx(1.25, rel=0.03)
    assert set(read_time_factors(after)) == set(KINDS)
    assert after["num_runs"] == 1
    assert after["peak_mean_absolute_relative_error"] == pytest.approx(0.25)
    assert after["step_time_mean_absolute_relative_error"] == pytest.approx(0.2)


def test_the_argument_is_left_as_it_was() -> None:
    before = run_many({}, [1.1])
    copy = {key: list(value) if isinstance(value, list) else value for key, value in before.items()}
    run_many(before, [2.0])
    assert before == copy


def test_many_runs_without_noise_recover_each_kinds_factor() -> None:
    fitted = fit_calibration(make_runs(60))
    for kind, factor in TRUE_FACTORS.items():
        assert fitted["time_factors"][kind] == pytest.approx(factor, rel=0.1)


def test_many_noisy_runs_predict_new_ones_better_than_one_factor_does() -> None:
    fitted = fit_calibration(make_runs(60, noise=0.05))
    common = {"step_time_factor": fitted["step_time_factor"]}
    new = make_runs(200, seed=1)

    def mean_error(calibration: dict[str, Any]) -> float:
        return sum(abs(predict_ms(calibration, run) / run.measured_ms - 1) for run in new) / len(new)

    assert mean_error(fitted) < 0.025 < 0.05 < mean_error(common)


def test_few_runs_move_kinds_little_from_the_common_factor() -> None:
    fitted = fit_calibration(make_runs(1))
    for factor in fitted["time_factors"].values():
        assert factor == pytest.approx(fitted["step_time_factor"], rel=0.1)


def test_a_few_wild_runs_do_not_move_the_factors() -> None:
    runs = make_runs(40)
    wild = [TimedRun(predicted_ms=run.predicted_ms, measured_ms=run.measured_ms * 5) for run in runs[::8]]
    fitted = fit_calibration([*runs, *wild])
    for run in runs:
        assert predict_ms(fitted, run) == pytest.approx(run.measured_ms, rel=0.1)


@pytest.mark.parametrize(
    "run",
    [
        TimedRun(predicted_ms={"matmul": 10.0}, measured_ms=float("nan")),
        TimedRun(predicted_ms={"matmul": 10.0}, measured_ms=0.0),
        TimedRun(predicted_ms={"matmul": float("inf")}, measured_ms=10.0),
        TimedRun(predicted_ms={"matmul": -1.0, "copy_in": 11.0}, measured_ms=10.0),
        TimedRun(predicted_ms={}, measured_ms=10.0),
        TimedRun(predicted_ms={"matmul": 10.0}, measured_ms=1e6),
    ],
)
def test_a_run_that_cannot_be_teaches_nothing(run: TimedRun) -> None:
    runs = make_runs(5)
    assert fit_calibration([*runs, run]) == fit_calibration(runs)


def test_a_prediction_that_was_already_corrected_is_not_corrected_again() -> None:
    """The machine takes 1.5 times as long; once predictions say so, the factors stay."""
    plain: dict[Any, float] = {"matmul": 60.0, "copy_out": 40.0}
    calibration: dict[Any, Any] = {}
    for _ in range(5):
        factors: dict[Any, float] = read_time_factors(calibration)
        exposed = {kind: kind_ms * factors.get(kind, 1.0) for kind, kind_ms in plain.items()}
        prediction = Predicted(step_ms=sum(exposed.values()), exposed_by_kind_ms=exposed, time_factors=factors)
        calibration = update_calibration(calibration, prediction=prediction, measured={"step_ms": 150.0})
    assert sum(read_time_factors(calibration)[kind] * kind_ms for kind, kind_ms in plain.items()) == pytest.approx(
        150, rel=0.02
    )
    assert calibration["runs"][-1]["predicted_ms"] == pytest.approx(plain)


def test_the_factor_inside_an_older_prediction_can_be_given() -> None:
    calibration = run_many({}, [1.5, 1.5, 1.5], applied=1.0)
    assert calibration["step_time_factor"] == pytest.approx(1.5, rel=0.02)


def test_a_calibration_of_the_first_version_loads_and_learns_on() -> None:
    old = {
        "step_time_factor": 1.2,
        "num_runs": 3,
        "recent_step_time_ratios": [1.2, 1.2, 1.2],
        "peak_mean_absolute_relative_error": 0.0,
        "step_time_mean_absolute_relative_error": 0.1,
    }
    assert read_time_factors(old) == dict.fromkeys(KINDS, 1.2)
    after = update_calibration(old, prediction=Predicted(step_ms=120.0), measured={"step_ms": 120.0})
    assert after["num_runs"] == 4
    assert len(after["runs"]) == 4
    assert after["step_time_factor"] == pytest.approx(1.2, rel=0.01)


def test_a_kind_stored_under_its_earlier_name_keeps_what_was_learnt_of_it() -> None:
    now = fit_calibration(make_runs(20, factors={"matmul": 1.0, "half_precision": 2.0, "dispatch": 1.0}))
    before = json.loads(json.dumps(now).replace("half_precision", "matmul_16"))
    assert read_time_factors(before) == read_time_factors(now)
    after = [
        update_calibration(
            calibration, prediction=Predicted(exposed_by_kind_ms={"matmul": 50.0, name: 50.0}), measured={"step_ms": 150.0}
        )
        for calibration, name in ((before, "matmul_16"), (now, "half_precision"))
    ]
    assert after[0] == after[1]


def test_a_kind_that_an_older_calibration_lacks_has_the_common_factor() -> None:
    older = fit_calibration(make_runs(20))
    assert read_time_factors(older)["half_precision"] == step_time_factor(older)


def test_old_runs_are_forgotten() -> None:
    calibration = fit_calibration(make_runs(3, factors={"matmul": 5.0}))
    for _ in range(MAX_RUNS):
        prediction = Predicted(exposed_by_kind_ms={"matmul": 100.0})
        calibration = update_calibration(calibration, prediction=prediction, measured={"step_ms": 100.0})
    assert len(calibration["runs"]) == MAX_RUNS
    assert calibration["time_factors"]["matmul"] == pytest.approx(1.0)


def test_the_interval_is_assumed_until_enough_runs_finish_and_then_covers_most_of_them() -> None:
    assert read_spread(fit_calibration(make_runs(MIN_SPREAD_RUNS - 1, noise=0.1))) is None
    spread = read_spread(fit_calibration(make_runs(40, noise=0.1)))
    assert spread.num_runs == 40
    assert 0.1 < spread.width < 0.3
    assert read_spread(fit_calibration(make_runs(40, noise=0.02))).width < spread.width / 2


def test_errors_are_averaged_over_all_runs() -> None:
    calibration = run_many({}, [1.25, 1.0], applied=1.0)
    assert calibration["step_time_mean_absolute_relative_error"] == pytest.approx(0.1)
    assert calibration["peak_mean_absolute_relative_error"] == 0.0


@pytest.mark.parametrize("measured", [{}, {"step_ms": None}, {"step_ms": 0.0}, {"step_ms": float("nan")}])
def test_a_run_without_numbers_is_not_counted(measured: dict[str, Any]) -> None:
    before = run_many({}, [1.3])
    assert update_calibration(before, prediction=Predicted(), measured=measured) == before


def test_a_run_with_a_peak_only_leaves_the_factors() -> None:
    before = run_many({}, [1.3])
    after = update_calibration(before, prediction=Predicted(), measured={"device_peak_bytes": 2000})
    assert after["time_factors"] == before["time_factors"]
    assert after["peak_mean_absolute_relative_error"] == pytest.approx(0.25)


def test_rates_follow_their_kinds_factors() -> None:
    machine = make_cpu_machine()
    calibration = {"version": 2, "step_time_factor": 1.0, "time_factors": {"copy_out": 2.0, "matmul": 1.5}}
    corrected = calibrated_machine(machine, calibration)
    assert corrected.rates.device_to_host_bytes_per_s == machine.rates.device_to_host_bytes_per_s / 2
    assert corrected.rates.host_to_device_bytes_per_s == machine.rates.host_to_device_bytes_per_s
    assert corrected.rates.time_factors["matmul"] == 1.5
    assert calibrated_machine(machine, calibration).rates is corrected.rates
    assert calibrated_machine(machine, None) is machine


def test_generations_have_factors_of_their_own_and_leave_those_of_steps() -> None:
    steps = fit_calibration(make_runs(20, factors={"matmul": 1.0, "dispatch": 1.0}))
    calibration = steps
    for run in make_runs(20, factors={"matmul": 2.0, "dispatch": 1.0}):
        calibration = learn_generation(calibration, run)
    assert read_time_factors(calibration) == read_time_factors(steps)
    own = of_generations(calibration)
    assert own["num_runs"] == 20
    assert own["time_factors"]["matmul"] > 1.5 * steps["time_factors"]["matmul"]
    after = update_calibration(calibration, prediction=Predicted(), measured={"step_ms": 125.0})
    assert of_generations(after) == own


def test_until_a_generation_has_finished_what_steps_taught_is_used() -> None:
    steps = fit_calibration(make_runs(20))
    assert of_generations(steps) == steps
    assert of_generations(None) is None


def test_a_generation_that_cannot_be_changes_nothing() -> None:
    run = TimedRun(predicted_ms={"matmul": 10.0}, measured_ms=1e6)
    assert learn_generation({"step_time_factor": 2.0}, run) == {"step_time_factor": 2.0}


def test_the_error_of_a_generation_is_that_of_the_calibration_before_it() -> None:
    once = learn_generation({}, TimedRun(predicted_ms={"matmul": 10.0}, measured_ms=20.0))
    assert of_generations(once)["step_time_mean_absolute_relative_error"] == pytest.approx(0.5)
