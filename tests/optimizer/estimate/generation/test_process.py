"""A generation's replayed allocations sum to the simulated ones, and a deep model costs no more."""

from dataclasses import replace

import pytest

from optimizer.base.units import MIB
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.process import add_generation_memory, list_generation_allocations
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

WORKLOAD = GenerationWorkload(prompt_length=24, num_new_tokens=6, num_sequences=4)
PLANS = tuple(GenerationPlan(batch_size=3, weights=WeightsPlan(place=place)) for place in ("device", "host", "disk"))


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    spec = read_model_spec({**SMALL_CONFIGS["llama"], "num_hidden_layers": 40})
    return profile_generation(spec, representations=("fp32",))


@pytest.fixture(scope="module")
def card() -> Machine:
    return table_machine("RTX 4090")


def with_memory(
    profile: GenerationProfile,
    machine: Machine,
    *,
    plan: GenerationPlan = PLANS[0],
    workload: GenerationWorkload = WORKLOAD,
) -> GenerationPrediction:
    prediction = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    return add_generation_memory(prediction, profile, plan=plan, workload=workload, machine=machine)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.weights.place)
def test_single_allocations_rise_to_the_simulated_peak(
    profile: GenerationProfile, machine: Machine, plan: GenerationPlan
) -> None:
    prediction = estimate_generation(profile, plan=plan, workload=WORKLOAD, machine=machine)
    found = list_generation_allocations(profile, plan=plan, workload=WORKLOAD, machine=machine)
    assert found.peak_bytes == prediction.device_peak_bytes
    assert sum(held.num_bytes for held in found.at_peak) == found.peak_bytes
    kv_bytes = sum(held.num_bytes for held in found.at_peak if held.category == "kv_cache")
    assert kv_bytes == prediction.device_bytes_by_category["kv_cache"]


def test_a_pass_leaves_nothing_but_the_weights(profile: GenerationProfile, machine: Machine) -> None:
    found = list_generation_allocations(profile, plan=PLANS[1], workload=WORKLOAD, machine=machine)
    for requests in (found.first_step, found.second_step):
        born = {key for key, num_bytes in requests if num_bytes}
        gone = {key for key, num_bytes in requests if not num_bytes}
        assert born == gone


def test_the_process_holds_context_workspaces_and_gaps_on_top(profile: GenerationProfile, card: Machine) -> None:
    memory = with_memory(profile, card).memory
    names = [part.name for part in memory.parts]
    assert names[-2:] == ["library workspaces", "CUDA context"]
    assert "KV cache" in " ".join(names) or any("key" in name.lower() for name in names)
    assert sum(part.num_bytes for part in memory.parts) == memory.process.value
    assert memory.process.value > memory.reserved.value + 100 * MIB
    assert memory.total_bytes > card.device.memory_bytes


def test_a_deep_model_is_replayed_at_two_depths_and_carried_on_to_the_byte_of_its_tensors(
    profile: GenerationProfile, card: Machine
) -> None:
    deep = with_memory(profile, card)
    assert deep.memory.allocated.value >= deep.device_peak_bytes
    kv = next(part for part in deep.memory.contributors if part.category == "kv_cache")
    assert kv.num_storages == 2 * 40
    assert kv.num_bytes == deep.kv_cache_bytes
    assert kv.made_in == "prefill of blocks 1 to 40 of 40"


def test_streamed_weights_are_pinned_where_they_lie(profile: GenerationProfile, card: Machine) -> None:
    found = with_memory(profile, card, plan=PLANS[1])
    assert found.memory.host_pinned.value == found.host_peak_bytes
    assert found.memory.host_pageable.value == 0
    assert found.memory.host_pinned.high > found.memory.host_pinned.value


def test_on_the_cpu_device_tensors_are_all_there_is(profile: GenerationProfile, machine: Machine) -> None:
    found = with_memory(profile, machine)
    assert found.memory.process.value == found.device_peak_bytes
    assert found.memory.total_bytes == 0


def test_the_verdict_is_the_worst_of_tensors_blocks_and_process(profile: GenerationProfile, card: Machine) -> None:
    found = with_memory(profile, card)
    roomy = 10 * found.device_peak_bytes
    assert found.verdict(roomy) == "fits"
    assert found.verdict(found.device_peak_bytes - 1) == "does_not_fit"
    assert found.verdict(found.device_peak_bytes) in ("tight", "does_not_fit")
    full = replace(found, memory=replace(found.memory, total_bytes=found.memory.process.value - MIB))
    assert full.verdict(roomy) in ("tight", "does_not_fit")
    unsure = replace(found, memory=replace(found.memory, not_modelled=("something",)))
    assert unsure.verdict(roomy) == "unknown"
