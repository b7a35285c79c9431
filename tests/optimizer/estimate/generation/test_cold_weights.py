"""A generation's products find their weights in the cache or in memory."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.generation.cold_weights import are_weights_cold, reading_weights
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

CURVES = {"mm fp32": ((1.0, 1e10),), "rows nt fp32": ((1.0, 1e10),), "rows nt fp32 cold": ((1.0, 1e9),)}


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    return profile_generation(read_model_spec(SMALL_CONFIGS["llama"]), representations=("fp32", "fp32/int8"))


def machine_of(cache_bytes: int) -> Machine:
    machine = make_cpu_machine()
    return replace(machine, rates=replace(machine.rates, cache_bytes=cache_bytes, matmul_curves=CURVES))


def sizes_of(profile: GenerationProfile) -> tuple[int, int]:
    """Bytes of all weights, and of the largest block's."""
    held = profile.weight_bytes("fp32")
    by_block = [held.by_block[kind] for kind in profile.block_kinds]
    return held.outside + sum(by_block), max(by_block)


def test_weights_that_stay_come_from_memory_where_all_of_them_are_more_than_half_of_the_cache(
    profile: GenerationProfile
) -> None:
    total, _ = sizes_of(profile)
    assert not are_weights_cold(profile, WeightsPlan(), machine_of(2 * total))
    assert are_weights_cold(profile, WeightsPlan(), machine_of(2 * total - 2))


def test_weights_that_were_just_copied_or_unpacked_are_there(profile: GenerationProfile) -> None:
    total, block = sizes_of(profile)
    small = machine_of(2 * total - 2)
    assert not are_weights_cold(profile, WeightsPlan(place="host"), small)
    assert not are_weights_cold(profile, WeightsPlan(frozen="int8"), small)
    assert are_weights_cold(profile, WeightsPlan(place="host"), machine_of(4 * block - 2))


def test_a_processor_without_a_reported_cache_gets_a_usual_one_and_cards_have_one_curve(
    profile: GenerationProfile
) -> None:
    assert not are_weights_cold(profile, WeightsPlan(), machine_of(None))
    card = table_machine("RTX 4090")
    assert not are_weights_cold(profile, WeightsPlan(), replace(card, rates=replace(card.rates, cache_bytes=1)))


def test_a_plan_takes_longer_by_the_products_that_read_from_memory(profile: GenerationProfile) -> None:
    workload = GenerationWorkload(prompt_length=8, num_new_tokens=8, num_sequences=1)

    def kinds(cache_bytes: int) -> dict[str, Any]:
        predicted = estimate_generation(profile, plan=GenerationPlan(), workload=workload, machine=machine_of(cache_bytes))
        return predicted.decode_by_kind_ms

    warm, cold = kinds(2**30), kinds(1)
    assert cold["matmul"] == pytest.approx(10 * warm["matmul"])
    assert {**cold, "matmul": 0} == {**warm, "matmul": 0}
    assert reading_weights(machine_of(1), are_cold=False) == machine_of(1)
