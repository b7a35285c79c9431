"""First steps held against their prediction."""

import dataclasses
from typing import Any

import pytest

from optimizer.base.units import MIB
from optimizer.estimate.job.probing import find_miss, probe_shortfall
from optimizer.estimate.prediction import Prediction
from tests.webapp.pages.rows import make_prediction


@pytest.fixture
def prediction() -> Prediction:
    return dataclasses.replace(
        make_prediction(), device_peak_bytes=90 * MIB, device_peak_high_bytes=100 * MIB, step_low_ms=800.0, step_high_ms=1200.0
    )


def miss(prediction: Prediction, **changes: Any) -> str:
    measured: dict[str, Any] = {"device_peak_bytes": 100 * MIB, "step_ms": 1000.0, "num_steps_left": 1000, "enough_left_s": 600}
    return find_miss(prediction, **{**measured, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"device_peak_bytes": 1}, ""),
        ({"device_peak_bytes": 101 * MIB}, "a step took 101 MiB of the device; predicted were at most 100 MiB"),
        ({"step_ms": 1300.0}, "a step took 1,300 ms; predicted were 800 to 1,200 ms"),
        ({"step_ms": 700.0}, "a step took 700 ms; predicted were 800 to 1,200 ms"),
        ({"step_ms": 1300.0, "num_steps_left": 461}, ""),
        ({"step_ms": 0.0}, ""),
    ],
)
def test_a_miss_is_said_where_there_is_time_left_to_mend_it(prediction: Prediction, changes: dict[str, Any], said: str) -> None:
    assert miss(prediction, **changes) == said


def test_what_a_probe_was_short_of_counts_from_the_likeliest_value(prediction: Prediction) -> None:
    assert probe_shortfall(prediction, device_peak_bytes=100 * MIB) is None
    found = probe_shortfall(prediction, device_peak_bytes=101 * MIB)
    assert found is not None
    assert (found.stage, found.num_bytes) == ("steady_step", 11 * MIB)
