"""Predictions for attention on the host: the bytes that cross the link, the growth of its time, and its rates."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.categories.optimizer_state import host_bytes_per_s
from optimizer.estimate.generation.kv.host_attention import ASSUMED_SHARES
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.process import list_generation_allocations
from optimizer.hardware.calibration import calibrated_rates
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

ON_HOST = KvCachePlan(place="host", attention="host")
NUM_BLOCKS, NUM_HEADS, NUM_GROUPS, DIM, BATCH = 6, 4, 2, 8, 16
RECORD_BYTES = 2 * BATCH * NUM_GROUPS * DIM * 4
QUERY_BYTES = BATCH * NUM_HEADS * DIM * 4


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    config = {**SMALL_CONFIGS["llama"], "max_position_embeddings": 4096, "num_hidden_layers": NUM_BLOCKS}
    return profile_generation(read_model_spec(config), representations=("fp32", "bf16"))


def predict(
    profile: GenerationProfile,
    machine: Machine,
    *,
    prompt_length: int = 1000,
    num_new: int = 200,
    weights: Any = None,
    cache: KvCachePlan = ON_HOST,
) -> GenerationPrediction:
    plan = GenerationPlan(batch_size=BATCH, kv_cache=cache, weights=weights or WeightsPlan())
    workload = GenerationWorkload(prompt_length=prompt_length, num_new_tokens=num_new, num_sequences=BATCH)
    return estimate_generation(profile, plan=plan, workload=workload, machine=machine)


def with_curve(machine: Machine, curve: tuple[tuple[float, float], ...], dtype: str = "fp32") -> Machine:
    return replace(machine, rates=replace(machine.rates, host_attention_curves={dtype: curve}))


@pytest.mark.parametrize("prompt_length", [10, 3000])
def test_what_crosses_the_link_for_a_token_does_not_grow_with_the_cache(
    profile: GenerationProfile, machine: Machine, prompt_length: int
) -> None:
    predicted = predict(profile, machine, prompt_length=prompt_length, num_new=5)
    assert predicted.copied_bytes == {
        "device_to_host": NUM_BLOCKS * (prompt_length * RECORD_BYTES + 4 * (RECORD_BYTES + QUERY_BYTES)),
        "host_to_device": NUM_BLOCKS * 4 * QUERY_BYTES,
    }


def test_a_decodes_time_is_that_of_reading_the_records_once(profile: GenerationProfile, machine: Machine) -> None:
    """The rate is the curve's at this model's two queries to a key: one FLOP for each byte."""
    fast = with_curve(machine, ((0.5, 1e9), (2.0, 4e9)))
    slow = with_curve(machine, ((0.5, 1e8), (2.0, 4e8)))
    found = [predict(profile, each, num_new=3) for each in (fast, slow)]
    read_bytes = NUM_BLOCKS * (1001 + 1002) * RECORD_BYTES
    assert found[1].lane_busy_ms["host"] - found[0].lane_busy_ms["host"] == pytest.approx(read_bytes * 9 / 2e9 * 1000)
    assert found[1].decode_ms - found[0].decode_ms == pytest.approx(read_bytes * 9 / 2e9 * 1000 / 2)
    assert found[0].prefill_ms == found[1].prefill_ms


def test_compute_waits_for_the_host_on_a_card_too(profile: GenerationProfile) -> None:
    machine = table_machine("NVIDIA GeForce RTX 4090")
    predicted = predict(profile, machine)
    assert predicted.exposed_ms["host"] >= predicted.lane_busy_ms["host"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_without_a_curve_the_host_reads_a_share_of_what_its_memory_gives(
    profile: GenerationProfile, machine: Machine, dtype: str
) -> None:
    rates = replace(machine.rates, host_optimizer_elements_per_s=1e8)
    flops_per_byte = 4 / WeightsPlan(dtype=dtype).bytes_per_element
    rate = ASSUMED_SHARES[dtype] * host_bytes_per_s(rates) * flops_per_byte
    assumed = replace(machine, rates=rates)
    known = with_curve(assumed, ((flops_per_byte, rate),), dtype)
    times = [predict(profile, each, weights=WeightsPlan(dtype=dtype)).decode_ms for each in (assumed, known)]
    assert times[0] == pytest.approx(times[1])


def test_finished_runs_correct_the_hosts_rate(machine: Machine) -> None:
    rates = with_curve(machine, ((0.5, 1e9), (2.0, 4e9))).rates
    assert calibrated_rates(rates, {"host": 2.0}).host_attention_curves == {"fp32": ((0.5, 5e8), (2.0, 2e9))}


def test_the_device_holds_no_block_of_the_cache_but_a_prompts_records(
    profile: GenerationProfile, machine: Machine
) -> None:
    brought = predict(profile, machine, num_new=200, cache=KvCachePlan(place="host", prefetch=0))
    attended = predict(profile, machine, num_new=200)
    saved_bytes = brought.device_peak_bytes - attended.device_peak_bytes
    assert saved_bytes == 199 * RECORD_BYTES
    assert attended.host_peak_bytes > brought.host_peak_bytes


def test_one_new_token_takes_no_room_on_the_host(profile: GenerationProfile, machine: Machine) -> None:
    brought = predict(profile, machine, num_new=1, cache=KvCachePlan(place="host", prefetch=0))
    attended = predict(profile, machine, num_new=1)
    assert attended.host_peak_bytes == brought.host_peak_bytes == NUM_BLOCKS * 1000 * RECORD_BYTES


def test_single_allocations_reach_the_same_peak(profile: GenerationProfile, machine: Machine) -> None:
    plan = GenerationPlan(batch_size=4, num_micro_batches=2, kv_cache=ON_HOST)
    workload = GenerationWorkload(prompt_length=100, num_new_tokens=60, num_sequences=8)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    found = list_generation_allocations(profile, plan=plan, workload=workload, machine=machine)
    assert found.peak_bytes == predicted.device_peak_bytes


def test_a_model_that_attends_in_code_of_its_own_is_refused(profile: GenerationProfile, machine: Machine) -> None:
    with pytest.raises(InvalidPlan, match="llama attends in code of its own, which runs on the device alone"):
        predict(replace(profile, on_host=None), machine)
