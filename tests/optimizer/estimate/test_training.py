"""Predicted bytes equal what the runtime's meter counts, and the rest of a prediction hangs together."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import MAX_TIMELINE_POINTS, estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


def make_plan(
    per_block: tuple[str, ...],
    *,
    micro_batch_size: int = 2,
    accumulation_steps: int = 1,
    dtype: str = "fp32",
    bits: int = 32,
) -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        weights=WeightsPlan(dtype=dtype),
        optimizer_state=OptimizerStatePlan(bits=bits),
        activations=ActivationsPlan(per_block=per_block),
    )


def make_workload(plan: Plan, *, sequence_length: int = 40) -> TrainingWorkload:
    return TrainingWorkload(sequence_length=sequence_length, global_batch_size=plan.batch.global_batch_size)


def predict(profile: Profile, machine: Machine, plan: Plan, **options: Any) -> Prediction:
    return estimate_training(profile, plan=plan, workload=make_workload(plan), machine=machine, **options)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"micro_batch_size": 1, "accumulation_steps": 2},
        {"dtype": "bf16", "accumulation_steps": 3},
    ],
    ids=["fp32", "micro-batch 1", "bf16 accumulated"],
)
@pytest.mark.parametrize(
    "per_block",
    [
        ("keep",) * 4,
        ("recompute",) * 4,
        ("offload",) * 4,
        ("keep", "offload", "recompute", "keep"),
    ],
    ids=["keep", "recompute", "offload", "mixed"],
)
def test_the_peak_is_what_the_meter_counts(
    spec: ModelSpec, profile: Profile, machine: Machine, per_block: tuple[str, ...], options: dict[str, Any]
) -> None:
    from optimizer.runtime.job.measure import measure_step

    plan = make_plan(per_block, **options)
    predicted = predict(profile, machine, plan)
    measured = measure_step(spec, plan=plan, workload=make_workload(plan))
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category


def test_categories_sum_to_the_peak_and_the_timeline_holds_it(profile: Profile, machine: Machine) -> None:
    predicted = predict(profile, machine, make_plan(("keep",) * 4, accumulation_steps=50))
    assert sum(predicted.device_bytes_by_category.values()) == predicted.device_peak_bytes
    totals = [sum(point.bytes_by_category.values()) for point in predicted.timeline]
    assert max(totals) == predicted.device_peak_bytes
    assert len(totals) <= MAX_TIMELINE_POINTS
    offsets = [point.offset_ms for point in predicted.timeline]
    assert offsets == sorted(offsets)


def test_recomputing_costs_time_and_saves_bytes(profile: Profile, machine: Machine) -> None:
    keep = predict(profile, machine, make_plan(("keep",) * 4))
    recompute = predict(profile, machine, make_plan(("recompute",) * 4))
    assert recompute.step_ms > keep.step_ms
    assert recompute.device_peak_bytes < keep.device_peak_bytes


def test_copies_are_exposed_whole_on_the_cpu_and_hidden_in_part_on_cuda(profile: Profile, machine: Machine) -> None:
    plan = make_plan(("offload",) * 4)
    serial = predict(profile, machine, plan)
    busy_ms = serial.lane_busy_ms["copy_in"] + serial.lane_busy_ms["copy_out"]
    assert serial.exposed_copy_ms == pytest.approx(busy_ms)
    card = dataclasses.replace(machine, device=dataclasses.replace(machine.device, kind="cuda"))
    assert 0 < predict(profile, card, plan).exposed_copy_ms < busy_ms


def test_finished_runs_scale_the_step_time(profile: Profile, machine: Machine) -> None:
    plan = make_plan(("keep",) * 4)
    plain = predict(profile, machine, plan)
    calibrated = predict(profile, machine, plan, calibration={"step_time_factor": 1.5})
    assert calibrated.step_ms == pytest.approx(1.5 * plain.step_ms)
    told = predict(
        profile, machine, plan, calibration={"step_time_factor": 1.5, "step_time_spread": 0.05, "num_spread_runs": 12}
    )
    assert told.step_high_ms == pytest.approx(1.05 * told.step_ms)
    assert (plain.num_time_runs, told.num_time_runs) == (0, 12)


def test_every_millisecond_of_a_step_has_a_kind(profile: Profile, machine: Machine) -> None:
    predicted = predict(profile, machine, make_plan(("keep", "recompute", "offload", "keep")))
    assert sum(predicted.exposed_by_kind_ms.values()) == pytest.approx(predicted.step_ms)
    assert {"matmul", "attention", "elementwise", "dispatch", "optimizer", "copy_out", "copy_in"} <= set(
        predicted.busy_by_kind_ms
    )
    assert 0 < predicted.recomputed_ms < predicted.step_ms
    assert predict(profile, machine, make_plan(("keep",) * 4)).recomputed_ms == 0


def test_a_factor_on_one_kind_moves_that_kind_alone(profile: Profile, machine: Machine) -> None:
    plan = make_plan(("keep", "recompute", "offload", "keep"))
    plain = predict(profile, machine, plan)
    for kind in plain.busy_by_kind_ms:
        moved = predict(profile, machine, plan, calibration={"time_factors": {kind: 3.0}})
        assert moved.busy_by_kind_ms == pytest.approx(
            {**plain.busy_by_kind_ms, kind: 3 * plain.busy_by_kind_ms[kind]}, rel=1e-3
        )


def test_a_librarys_buffers_of_bf16_are_not_those_of_fp16(profile: Profile, machine: Machine) -> None:
    """fp16 has bf16's sizes, but torch's own products."""
    many_threads = dataclasses.replace(machine, num_threads=64)
    packs = dataclasses.replace(many_threads, packs_bf16=True)

    def unmetered_bytes(dtype: str, where: Machine) -> int:
        plan = make_plan(("keep",) * 4, micro_batch_size=8, dtype=dtype)
        return predict(profile, where, plan).unmetered_bytes

    assert unmetered_bytes("bf16", packs) > unmetered_bytes("bf16", many_threads)
    assert unmetered_bytes("fp16", packs) == unmetered_bytes("fp16", many_threads)


def test_a_depth_that_is_not_the_models_is_refused(profile: Profile, machine: Machine) -> None:
    with pytest.raises(InvalidPlan, match="names 3 blocks; the model has 4"):
        predict(profile, machine, make_plan(("keep",) * 3))


def test_a_sequence_beyond_the_position_table_is_refused_by_name(profile: Profile, machine: Machine) -> None:
    plan = make_plan(("keep",) * 4)
    workload = make_workload(plan, sequence_length=129)
    with pytest.raises(InvalidWorkload, match="sequence_length is 129; this model has positions for 8 to 128"):
        estimate_training(profile, plan=plan, workload=workload, machine=machine)


def test_a_profile_survives_json(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_pricing_imports_no_torch() -> None:
    code = "import sys, optimizer.estimate.training, optimizer.profile.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
