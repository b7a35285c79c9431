"""Thread wake-ups are priced for ops that run on several threads while the others sleep, and show in an estimate."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.hardware.thread_wakeup import (
    ASLEEP_S,
    AWAKE_S,
    BESIDE_KERNELS,
    GRAIN_SIZE,
    UNEVEN,
    count_multithreaded,
    runs_multithreaded,
    thread_wakeup_s,
    wakeup_cost_s,
)
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.time_kinds import KINDS
from optimizer.workload import TrainingWorkload

WAKE_S = 30e-6


def is_shared(
    kind: str, name: str, *, dtype: str = "fp32", flops: float = 0.0, read: float = 0.0, written: float = 0.0
) -> bool:
    sizes = {"flops": flops, "read_bytes": read, "written_bytes": written}
    arrays = {what: np.array([size], dtype=np.float64) for what, size in sizes.items()}
    return bool(runs_multithreaded(kind, f"aten.{name}.default", dtype, **arrays)[0])


def product(rows: int, inner: int, columns: int) -> dict[str, int]:
    read, written = 4 * (rows * inner + inner * columns), 4 * rows * columns
    return {"flops": 2 * rows * inner * columns, "read": read, "written": written}


@pytest.mark.parametrize(("num_elements", "dtype"), [(GRAIN_SIZE, "fp32"), (GRAIN_SIZE, "bf16")])
def test_element_wise_ops_are_shared_from_the_grain_on(num_elements: int, dtype: str) -> None:
    size = 2 if dtype == "bf16" else 4
    whole = {"dtype": dtype, "read": 2.0 * num_elements * size}
    assert is_shared("memory", "mul", written=float(num_elements * size), **whole)
    assert not is_shared("memory", "mul", written=float((num_elements - 1) * size), **whole)


def test_a_sum_is_shared_by_what_it_reads_and_allocations_are_not_at_all() -> None:
    assert is_shared("memory", "sum", read=4.0 * GRAIN_SIZE, written=4.0)
    assert not is_shared("memory", "empty_like", written=8.0 * GRAIN_SIZE)


def test_rows_are_divided_and_a_single_one_is_not() -> None:
    rows, width = 2, 64
    assert is_shared("memory", "_softmax", read=4.0 * rows * width, written=4.0 * rows * width)
    assert is_shared("memory", "native_layer_norm", read=4.0 * (rows + 2) * width, written=4.0 * rows * (width + 2))
    assert not is_shared("memory", "native_layer_norm", read=4.0 * 3 * width, written=4.0 * (width + 2))


def test_products_are_shared_but_the_smallest_and_those_of_one_row() -> None:
    assert is_shared("matmul", "mm", **product(4, 64, 64))
    assert not is_shared("matmul", "mm", **product(1, 512, 512))
    assert not is_shared("matmul", "mm", **product(2, 16, 16))
    assert is_shared("attention", "_scaled_dot_product_flash_attention_for_cpu", flops=10.0)


def wait(*gaps_s: float, shared: Any = None, kernel_s: float = 0.0) -> float:
    """gaps_s: as they are in a real model."""
    flags = np.ones(len(gaps_s), dtype=bool) if shared is None else np.array(shared)
    return thread_wakeup_s(flags, np.full(len(gaps_s), kernel_s), np.array(gaps_s), wake_s=WAKE_S)


def test_an_op_soon_after_the_last_shared_one_wakes_no_thread_and_a_late_one_wakes_all() -> None:
    assert wait(AWAKE_S, AWAKE_S / 2) == 0.0
    assert wait(AWAKE_S, ASLEEP_S, AWAKE_S, 2 * ASLEEP_S) == pytest.approx(2 * WAKE_S)
    assert wait((AWAKE_S + ASLEEP_S) / 2) == pytest.approx(WAKE_S / 2)


def test_what_one_thread_does_between_shared_ops_adds_up_kernels_included() -> None:
    third_s = ASLEEP_S / 3
    assert wait(third_s, third_s, third_s, shared=[True, False, False]) == pytest.approx(WAKE_S)
    assert wait(0.0, 0.0, 0.0, shared=[True, False, False], kernel_s=ASLEEP_S / 2) == pytest.approx(WAKE_S)
    assert wait(third_s, third_s, third_s, shared=[False, False, False]) == 0.0


def test_threads_of_a_long_op_end_apart_and_the_first_sleeps() -> None:
    assert wait(0.0, kernel_s=ASLEEP_S / UNEVEN) == pytest.approx(WAKE_S)
    assert wait(0.0, kernel_s=AWAKE_S / UNEVEN) == 0.0


def test_a_part_follows_one_like_it() -> None:
    assert wait(ASLEEP_S / 2, ASLEEP_S / 2, shared=[True, False]) == pytest.approx(WAKE_S)


def test_tensors_that_come_and_go_wake_where_they_are_large_and_python_lies_between(machine: Machine) -> None:
    rates = dataclasses.replace(machine.rates, wake_s=WAKE_S, time_factors={"hooks": 2.0, "host": 3.0})
    assert count_multithreaded((GRAIN_SIZE, GRAIN_SIZE - 1, 2 * GRAIN_SIZE)) == 2
    assert wakeup_cost_s(4, rates, after_s=ASLEEP_S) == pytest.approx(4 * WAKE_S * 2)
    assert wakeup_cost_s(4, rates, after_s=ASLEEP_S, kind="host") == pytest.approx(4 * WAKE_S * 3)
    assert wakeup_cost_s(4, rates, after_s=AWAKE_S / BESIDE_KERNELS) == 0.0
    assert wakeup_cost_s(4, machine.rates, after_s=ASLEEP_S) == 0.0


@pytest.mark.parametrize("choice", ["keep", "recompute", "selective", "offload"])
def test_an_estimate_has_it_under_dispatch_and_where_nobody_must_be_woken_nothing_changes(
    choice: str, profile: Profile, machine: Machine
) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=4, accumulation_steps=1),
        activations=ActivationsPlan(per_block=(choice,) * profile.num_blocks),
    )
    workload = TrainingWorkload(sequence_length=32, global_batch_size=4)

    def estimate(**more: Any) -> Prediction:
        slow = {"forward_dispatch_s": 50e-6, "backward_dispatch_s": 50e-6, **more}
        rates = dataclasses.replace(machine.rates, **slow)
        other = dataclasses.replace(machine, rates=rates)
        return estimate_training(profile, plan=plan, workload=workload, machine=other)

    quiet, waking = estimate(), estimate(wake_s=WAKE_S)
    more_ms = waking.step_ms - quiet.step_ms
    assert more_ms > profile.num_blocks * WAKE_S * 1000
    quiet_kinds, waking_kinds = quiet.exposed_by_kind_ms, waking.exposed_by_kind_ms
    assert waking_kinds["dispatch"] - quiet_kinds["dispatch"] == pytest.approx(more_ms)
    assert waking.device_peak_bytes == quiet.device_peak_bytes


def test_what_finished_runs_say_scales_each_kind_and_changes_no_count(
    profile: Profile, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Counts its small tensors as shared too. The length is in no other test, since compiled shapes are kept.
    monkeypatch.setattr("optimizer.hardware.thread_wakeup.GRAIN_SIZE", 64)
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
        activations=ActivationsPlan(per_block=("selective", "keep") * (profile.num_blocks // 2)),
        gradients=GradientsPlan(choice="host"),
        weights=WeightsPlan(place="host"),
        optimizer_state=OptimizerStatePlan(place="host"),
    )
    workload = TrainingWorkload(sequence_length=23, global_batch_size=4)
    rates = dataclasses.replace(machine.rates, wake_s=WAKE_S, python_s={"gradients": 1e-4, "weights": 2e-5})
    waking = dataclasses.replace(machine, rates=rates)
    factors: dict[str, float] = {kind: 1.0 + place / 10 for place, kind in enumerate(KINDS)}

    def by_kind(on: Machine = waking, **more: Any) -> dict[str, Any]:
        return estimate_training(profile, plan=plan, workload=workload, machine=on, **more).exposed_by_kind_ms

    bare, corrected = by_kind(), by_kind(calibration={"version": 2, "time_factors": factors})
    quiet = by_kind(dataclasses.replace(machine, rates=dataclasses.replace(rates, wake_s=0.0)))
    assert all(bare[kind] > quiet[kind] for kind in ("dispatch", "hooks", "host"))
    assert corrected == {kind: pytest.approx(factors[kind] * kind_ms) for kind, kind_ms in bare.items()}
