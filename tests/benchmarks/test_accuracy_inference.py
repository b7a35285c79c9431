"""Generations held against the estimate: cases are told apart, and one row says what two meters counted."""

import pytest

from benchmarks.accuracy_inference import (
    TECHNIQUES,
    list_inference_cases,
    make_inference_case,
    measure_inference_memory,
    predict_and_measure,
)
from tests.optimizer.machines import make_cpu_machine


def test_cases_have_names_of_their_own_and_use_every_technique():
    cases = list_inference_cases()
    assert len({case.name for case in cases}) == len(cases) >= 50
    assert {name for case in cases for name in case.techniques} == {"generate", *TECHNIQUES}
    assert 0 < sum(case.is_held_back for case in cases) < len(cases) / 2


@pytest.mark.parametrize("techniques", [(), ("int8", "streamed")])
def test_two_meters_and_the_estimate_agree_to_the_byte(techniques):
    case = make_inference_case("llama", "tiny", techniques, prompt=(8, 5, 3))
    row = measure_inference_memory(case, machine=make_cpu_machine())
    assert row["error_to_meter_bytes"] == row["unseen_by_meter_bytes"] == row["host_error_bytes"] == 0
    assert row["wrong_categories"] == {}
    assert row["predicted_moment"] == row["measured_moment"]


def test_a_case_is_predicted_and_measured_in_one_call():
    case = make_inference_case("llama", "tiny", (), prompt=(8, 5, 3))
    predicted, measured = predict_and_measure(case, machine=make_cpu_machine())
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert measured.tokens.shape == (4, 5)
