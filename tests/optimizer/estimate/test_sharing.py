"""What jobs on one device cost each other."""

from typing import Any

import pytest

from optimizer.estimate.sharing import gains, lane_shares, slowdown


def training(**busy_ms: float) -> dict[str, Any]:
    return {"step_ms": 100.0, "busy_by_kind_ms": busy_ms}


def test_kinds_of_work_of_one_lane_add_up_and_copies_have_lanes_of_their_own() -> None:
    shares = lane_shares(training(matmul=30.0, attention=10.0, copy_in=50.0, host=20.0), device_kind="cuda")
    assert shares == {"compute": pytest.approx(0.4), "copy_in": 0.5, "host": 0.2}


def test_a_card_is_free_while_its_host_prepares_work_and_the_cpu_device_is_not() -> None:
    prediction = training(matmul=40.0, dispatch=50.0, hooks=10.0)
    assert lane_shares(prediction, device_kind="cuda") == {"compute": 0.4}
    assert lane_shares(prediction, device_kind="cpu") == {"compute": 1.0}


def test_no_lane_is_busy_for_longer_than_the_whole_step() -> None:
    assert lane_shares(training(disk=130.0), device_kind="cpu") == {"disk": 1.0}


def test_a_generation_s_time_is_that_of_its_phases() -> None:
    prediction = {
        "prefill_by_kind_ms": {"matmul": 20.0, "copy_in": 5.0},
        "decode_by_kind_ms": {"matmul": 20.0, "dispatch": 30.0, "copy_in": 25.0},
        "lane_busy_ms": {"compute": 70.0, "copy_in": 60.0},
    }
    assert lane_shares(prediction, device_kind="cuda") == {"compute": 0.4, "copy_in": 0.6}


@pytest.mark.parametrize("prediction", [None, {}, {"step_ms": 0.0}, {"prefill_by_kind_ms": {}, "lane_busy_ms": {}}])
def test_what_a_prediction_does_not_say_is_not_guessed(prediction: dict[str, Any] | None) -> None:
    assert lane_shares(prediction, device_kind="cuda") is None


def test_jobs_are_slower_by_the_lane_that_is_wanted_most() -> None:
    assert slowdown([]) == 1.0
    assert slowdown([{"compute": 0.4}, {"compute": 0.5, "copy_in": 0.9}]) == 1.0
    assert slowdown([{"compute": 0.4, "copy_in": 0.6}, {"compute": 0.5, "copy_in": 0.9}]) == pytest.approx(1.5)


def test_a_job_joins_where_more_is_done_by_all_and_not_where_they_only_take_turns() -> None:
    assert gains([], {"compute": 1.0})
    assert gains([{"compute": 0.4}], {"compute": 0.5})
    assert not gains([{"compute": 0.95}], {"compute": 0.9})
    assert gains([{"compute": 0.9}], {"compute": 0.1, "copy_in": 0.9})


def test_a_third_job_is_held_against_what_two_do_already() -> None:
    two = [{"compute": 0.5}, {"compute": 0.5}]
    assert not gains(two, {"compute": 0.5})
    assert gains(two, {"disk": 0.9})
