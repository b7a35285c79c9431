"""Jobs on one device slow each other down."""

from typing import Any

import pytest

from optimizer.base.units import GIB, MIB
from optimizer.estimate.sharing import (
    device_need_bytes,
    gains,
    host_need_bytes,
    host_need_together,
    lane_shares,
    slowdown,
)
from optimizer.hardware.machine import Device

CARD = Device(kind="cuda", name="card", memory_bytes=8 * GIB, context_bytes=400 * MIB, workspace_bytes=8 * MIB)
PROCESSOR = Device(kind="cpu", name="processor", memory_bytes=8 * GIB)


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


def peaks(high_bytes: int, *, stages: dict[str, int] | None = None, process_bytes: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = {
        "device_peak_high_bytes": high_bytes,
        "stages": [{"stage": name, "device_peak_bytes": size} for name, size in (stages or {}).items()],
    }
    if process_bytes:
        document["memory"] = {"allocated": {"high": high_bytes}, "process": {"high": process_bytes}}
    return document


def need_bytes(prediction: dict[str, Any] | None, *, budget_bytes: int | None = None, device: Device | None = PROCESSOR) -> int:
    return device_need_bytes(prediction, budget_bytes=budget_bytes, device=device)


def test_a_job_needs_the_bytes_of_its_highest_stage_and_never_more_than_its_budget() -> None:
    loads_more = peaks(2 * GIB, stages={"load": 3 * GIB, "steady_step": GIB})
    assert need_bytes(loads_more) == 3 * GIB
    assert need_bytes(loads_more, budget_bytes=4 * GIB) == 3 * GIB
    assert need_bytes(loads_more, budget_bytes=GIB) == GIB
    assert need_bytes(None, budget_bytes=GIB) == GIB
    assert need_bytes(None) == 0


def test_a_process_takes_more_of_a_card_than_its_tensors_whatever_the_budget() -> None:
    with_context = peaks(2 * GIB, process_bytes=2 * GIB + 600 * MIB)
    assert need_bytes(with_context, device=CARD) == 2 * GIB + 600 * MIB
    assert need_bytes(with_context, budget_bytes=2 * GIB, device=CARD) == 2 * GIB + 600 * MIB
    assert need_bytes(with_context, budget_bytes=GIB, device=CARD) == GIB + 600 * MIB
    assert need_bytes(peaks(2 * GIB), device=PROCESSOR) == 2 * GIB


def test_where_nobody_worked_out_the_process_its_context_and_the_allocator_s_limit_count() -> None:
    assert need_bytes(peaks(4 * GIB), device=CARD) == 4 * GIB + 408 * MIB + 512 * MIB


def test_a_job_alone_is_never_too_large_for_the_card_it_was_planned_for() -> None:
    assert need_bytes(peaks(8 * GIB - MIB, process_bytes=8 * GIB + 300 * MIB), device=CARD) == 8 * GIB


def test_host_bytes_are_those_of_the_highest_stage() -> None:
    assert host_need_bytes({"host_peak_bytes": 5, "stages": [{"host_peak_bytes": 9}, {"host_peak_bytes": 7}]}) == 9
    assert (host_need_bytes({"host_peak_bytes": 5}), host_need_bytes({}), host_need_bytes(None)) == (5, 0, 0)


def test_what_jobs_of_one_base_share_on_the_host_counts_once() -> None:
    small, large = {"host_peak_bytes": 10, "base_bytes": 8}, {"host_peak_bytes": 13, "base_bytes": 8}
    assert host_need_together([(small, 1, "a"), (large, 1, "a")]) == 15
    assert host_need_together([(small, 1, "a"), (large, 1, "b")]) == 23
    assert host_need_together([(small, 1, "a"), ({"host_peak_bytes": 4}, 2, "a"), (None, 1, "a")]) == 18
    assert host_need_together([]) == 0
