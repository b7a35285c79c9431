"""Allocations spelled out from a schedule are those of a real step, and end in what the step's peak is made of."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reserved import draw_plan, log_steps, predict_steps, replay_scaled
from optimizer.base.units import MIB
from optimizer.estimate.card.allocations import MAX_LATER
from optimizer.estimate.card.training_memory import list_training_allocations
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

PLANS: dict[str, Any] = {
    "keep": {},
    "accumulate": {"batch": BatchPlan(micro_batch_size=1, accumulation_steps=2)},
    "recompute": {"activations": ActivationsPlan(per_block=("recompute",) * 4)},
    "mixed": {"activations": ActivationsPlan(per_block=("offload", "selective", "keep", "recompute"))},
    "bf16": {"weights": WeightsPlan(dtype="bf16")},
    "consume": {"gradients": GradientsPlan(choice="consume")},
    "streamed": {
        "gradients": GradientsPlan(choice="host"),
        "optimizer_state": OptimizerStatePlan(place="host"),
        "weights": WeightsPlan(place="host"),
    },
}


def make_plan(**rows: Any) -> Plan:
    return Plan(**{
        "batch": BatchPlan(micro_batch_size=2, accumulation_steps=1),
        "activations": ActivationsPlan(per_block=("keep",) * 4),
        **rows,
    })  # fmt: skip


def make_workload(plan: Plan) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=24,
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
    )


def sizes_that_come(requests: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> list[int]:
    """Sizes of the requests in order, without numbers and pairs of ids, which a schedule sums up."""
    return [num_bytes for _, num_bytes in requests if num_bytes > 1024]


@pytest.mark.parametrize("name", PLANS)
def test_the_same_sizes_come_in_the_same_order_as_in_a_real_step(
    name: str, spec: ModelSpec, profile: Profile, tmp_path: Path
) -> None:
    plan = make_plan(**PLANS[name])
    real, _ = log_steps(spec, plan=plan, workload=make_workload(plan), scratch=tmp_path)
    predicted = predict_steps(profile, plan=plan, workload=make_workload(plan))
    for found, expected in zip(predicted.phases, real, strict=True):
        assert sizes_that_come(found) == sizes_that_come(expected)


@pytest.mark.parametrize("name", PLANS)
def test_their_peak_is_the_predicted_one_and_is_listed_storage_by_storage(
    name: str, profile: Profile, machine: Machine
) -> None:
    plan = make_plan(**PLANS[name])
    workload = make_workload(plan)
    found = list_training_allocations(profile, plan=plan, workload=workload, machine=machine)
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    assert found.peak_bytes == prediction.device_peak_bytes
    by_category = dict.fromkeys(prediction.device_bytes_by_category, 0)
    for held in found.at_peak:
        by_category[held.category] += held.num_bytes
    assert by_category == prediction.device_bytes_by_category


@pytest.mark.parametrize("seed", range(4))
def test_replayed_they_reserve_what_the_real_ones_do(
    seed: int, spec: ModelSpec, profile: Profile, tmp_path: Path
) -> None:
    plan = draw_plan(random.Random(seed), 4)
    workload = make_workload(plan)
    if plan.find_conflict(workload) is not None:
        plan = make_plan(activations=plan.activations)
        workload = make_workload(plan)
    real, _ = log_steps(spec, plan=plan, workload=workload, scratch=tmp_path)
    predicted = predict_steps(profile, plan=plan, workload=workload)
    for scale in (256, 4096):
        measured, expected = replay_scaled(real, scale), replay_scaled(predicted.phases, scale)
        # One segment more or less is what two storages of one size, freed in the other order, can make.
        difference = abs(expected.reserved_peak_bytes - measured.reserved_peak_bytes)
        assert difference <= max(22 * MIB, 0.04 * measured.reserved_peak_bytes)


def test_tensors_that_are_freed_were_allocated_before(profile: Profile, machine: Machine) -> None:
    plan = make_plan(**PLANS["mixed"])
    found = list_training_allocations(profile, plan=plan, workload=make_workload(plan), machine=machine)
    live = set()
    for requests in found.phases:
        for key, num_bytes in requests:
            if num_bytes:
                assert key not in live
                live.add(key)
            else:
                live.remove(key)


def test_a_step_leaves_what_was_there_before_it(profile: Profile, machine: Machine) -> None:
    plan = make_plan()
    found = list_training_allocations(profile, plan=plan, workload=make_workload(plan), machine=machine)
    balance = {}
    for key, num_bytes in found.second_step:
        balance[key] = num_bytes
    assert not any(balance.values())


def test_of_many_micro_batches_only_the_first_are_spelled_out(profile: Profile, machine: Machine) -> None:
    counts = []
    for steps in (1 + MAX_LATER, 8):
        plan = make_plan(batch=BatchPlan(micro_batch_size=1, accumulation_steps=steps))
        found = list_training_allocations(profile, plan=plan, workload=make_workload(plan), machine=machine)
        counts.append(len(found.second_step))
    assert counts[0] == counts[1]


def test_storages_at_the_peak_have_the_name_of_what_made_them(profile: Profile, machine: Machine) -> None:
    plan = make_plan()
    found = list_training_allocations(profile, plan=plan, workload=make_workload(plan), machine=machine)
    weights = [held for held in found.at_peak if held.category == "weights"]
    assert {held.made_in for held in weights} == {"between steps"}
    saved = [held for held in found.at_peak if held.category == "activations"]
    assert ("forward", 1) in {(held.made_in, held.block) for held in saved}
    assert "aten.addmm.default" in {held.op for held in saved}
