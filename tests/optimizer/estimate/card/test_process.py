"""A card holds more than tensors: memory on top of them, contents at the peak, bounds, and the verdict on the whole process."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.intervals import ByteInterval, exact_interval, sum_intervals
from optimizer.base.units import GIB, MIB
from optimizer.estimate.card.depth import cut_short
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.formats.transfer_sizes import ARENA_SLAB_BYTES
from optimizer.hardware.cuda_facts import CONTEXT_SIZES, find_context, find_workspaces
from optimizer.hardware.devices import known_devices, table_machine
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=24, global_batch_size=2)


def make_plan(per_block: tuple[str, ...] = ("keep",) * 4, **rows: Any) -> Plan:
    return Plan(**{
        "batch": BatchPlan(micro_batch_size=2, accumulation_steps=1),
        "activations": ActivationsPlan(per_block=per_block),
        **rows,
    })  # fmt: skip


def predict(
    profile: Profile, machine: Machine, plan: Plan | None = None, workload: TrainingWorkload = WORKLOAD
) -> Prediction:
    plan = plan or make_plan()
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    return add_memory(prediction, profile, plan=plan, workload=workload, machine=machine)


@pytest.fixture
def card() -> Machine:
    return table_machine("T4")


def test_parts_add_up_to_what_the_process_takes(profile: Profile, card: Machine) -> None:
    memory = predict(profile, card).memory
    assert sum(part.num_bytes for part in memory.parts) == memory.process.value
    names = [part.name for part in memory.parts]
    assert names[0] == "weights"
    assert names[-2:] == ["library workspaces", "CUDA context"]


def test_each_step_from_tensors_to_the_process_only_adds(profile: Profile, card: Machine) -> None:
    prediction = predict(profile, card)
    memory = prediction.memory
    assert prediction.device_peak_bytes <= memory.allocated.value <= memory.reserved.value < memory.process.value
    for interval in (memory.allocated, memory.reserved, memory.process, memory.host_pinned, memory.host_pageable):
        assert interval.low <= interval.value <= interval.high


def test_on_the_cpu_device_nothing_comes_on_top(profile: Profile, machine: Machine) -> None:
    prediction = predict(profile, machine)
    memory = prediction.memory
    assert memory.process == memory.reserved == memory.allocated
    assert memory.process.value == prediction.device_peak_bytes
    assert sum(part.num_bytes for part in memory.parts) == prediction.device_peak_bytes
    assert memory.host_pinned == exact_interval(0)


def test_contributors_say_what_is_in_memory_and_what_made_it(profile: Profile, machine: Machine) -> None:
    prediction = predict(profile, machine)
    found = prediction.memory.contributors
    assert found[0].num_bytes == max(one.num_bytes for one in found)
    assert "forward of blocks 1 to 4 of 4" in {one.made_in for one in found}
    assert {one.category for one in found if one.made_in == "between steps"} == {"weights", "optimizer_state"}


def test_memory_survives_json(profile: Profile, card: Machine) -> None:
    prediction = predict(profile, card)
    assert type(prediction).from_json(prediction.to_json()) == prediction


# Verdicts.


def on_a_card_of(machine: Machine, total_bytes: int) -> Machine:
    return replace(machine, device=replace(machine.device, total_bytes=total_bytes))


def test_tensors_that_fit_the_budget_do_not_fit_a_card_that_the_process_fills(profile: Profile, card: Machine) -> None:
    process = predict(profile, card).memory.process
    roomy, tight, small = process.high, process.high - 1, process.value // 4
    verdicts = [predict(profile, on_a_card_of(card, size)).verdict(GIB) for size in (roomy, tight, small)]
    assert verdicts == ["fits", "tight", "does_not_fit"]


def test_a_budget_is_held_against_whole_blocks_where_they_were_worked_out(profile: Profile, card: Machine) -> None:
    prediction = predict(profile, card)
    high = prediction.memory.allocated.high
    assert high > prediction.device_peak_high_bytes
    assert prediction.verdict(high) == "fits"
    assert prediction.verdict(high - 1) == "tight"
    assert prediction.verdict(prediction.memory.allocated.value - 1) == "does_not_fit"
    assert replace(prediction, memory=None).verdict(prediction.device_peak_high_bytes) == "fits"


def test_of_a_card_of_unknown_kind_nobody_can_say_that_it_fits(profile: Profile, card: Machine) -> None:
    unknown = replace(card, device=replace(card.device, compute_capability="99.0"))
    prediction = predict(profile, unknown)
    assert prediction.verdict(GIB) == "unknown"
    assert prediction.memory.not_modelled == (
        "T4 is a card of compute capability 99.0, whose CUDA context is not in the table; run the probe on it",
    )
    assert prediction.verdict(1) == "does_not_fit"


def test_what_was_measured_replaces_the_table(card: Machine) -> None:
    measured = replace(card.device, context_bytes=200 * MIB, workspace_bytes=70 * MIB, compute_capability="")
    assert find_context(measured).num_bytes.value == 200 * MIB
    assert find_context(measured).source == "measured by the probe"
    assert find_workspaces(measured) == exact_interval(70 * MIB)


def test_every_card_of_the_table_has_a_context_with_its_source() -> None:
    missing = {
        device.name for device in known_devices().values() if device.compute_capability not in CONTEXT_SIZES
    }
    assert missing == set()
    assert all(size.source for size in CONTEXT_SIZES.values())


def test_intervals_add_bound_by_bound() -> None:
    parts = [exact_interval(5), ByteInterval(low=1, value=2, high=4)]
    assert sum_intervals(parts) == ByteInterval(low=6, value=7, high=9)


# The host.


def test_offloaded_bytes_are_pinned_in_whole_slabs(profile: Profile, card: Machine) -> None:
    plan = make_plan(("offload",) * 4)
    prediction = predict(profile, card, plan)
    assert 0 < prediction.host_peak_bytes < ARENA_SLAB_BYTES
    assert prediction.memory.host_pinned.value == ARENA_SLAB_BYTES
    assert prediction.memory.host_pageable == exact_interval(0)


def test_moments_on_the_host_are_not_pinned_and_gradients_are(profile: Profile, card: Machine) -> None:
    plan = make_plan(gradients=GradientsPlan(choice="host"), optimizer_state=OptimizerStatePlan(place="host"))
    memory = predict(profile, card, plan).memory
    num_bytes = 4 * sum(tensor.num_elements for tensor in profile.tensors.in_order())
    assert memory.host_pageable.value == 2 * num_bytes + 4 * len(profile.tensors.in_order())
    # Gradients, and the master copies that go back to the device.
    assert memory.host_pinned.low >= 2 * num_bytes


# Deep models.


def deepened(profile: Profile, num_blocks: int) -> Profile:
    def stretched(kinds: tuple[int, ...]) -> tuple[int, ...]:
        return (kinds[0], *(kinds[1],) * (num_blocks - 2), kinds[-1])

    regimes = {
        name: tuple(replace(regime, block_templates=stretched(regime.block_templates)) for regime in regimes)
        for name, regimes in profile.regimes.items()
    }
    tensors = replace(profile.tensors, block_kinds=stretched(profile.tensors.block_kinds))
    return replace(profile, num_blocks=num_blocks, tensors=tensors, regimes=regimes)


def test_a_deep_model_is_carried_on_from_two_that_are_cut_short(
    profile: Profile, card: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = deepened(profile, 48)
    assert isinstance(deep, Profile)
    plan = make_plan(("keep",) * 20 + ("recompute",) * 28)
    shorter, longer = cut_short(deep, plan)
    assert len(shorter.kept) < len(longer.kept) <= 20
    assert (longer.kept[0], longer.kept[-1]) == (0, 47)
    carried = predict(deep, card, plan)
    monkeypatch.setattr("optimizer.estimate.card.training_memory.cut_short", lambda *_: None)
    whole = predict(deep, card, plan)
    # Less than a segment: these tensors are tiny.
    assert abs(carried.memory.reserved.value - whole.memory.reserved.value) <= 20 * MIB
    largest = [
        {(one.category, one.op): one.num_bytes for one in memory.contributors[:3]}
        for memory in (carried.memory, whole.memory)
    ]
    assert largest[0] == pytest.approx(largest[1], rel=0.05)


def test_a_model_of_few_or_of_different_blocks_is_not_cut(profile: Profile) -> None:
    assert cut_short(profile, make_plan()) is None
    deep = deepened(profile, 48)
    assert cut_short(deep, make_plan(("keep", "recompute") * 24)) is None


def test_segments_that_grow_waste_less(profile: Profile, card: Machine) -> None:
    plain = predict(profile, card)
    growing = predict(profile, card, make_plan(allocator=AllocatorPlan(expandable_segments=True)))
    assert growing.memory.reserved.value <= plain.memory.reserved.value
