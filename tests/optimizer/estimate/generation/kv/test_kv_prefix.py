"""Rebuilding keys and values is priced to the byte and to the copy, and in time where it pays and where it does not."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.process import add_generation_memory, list_generation_allocations
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.estimate.generation.kv.test_kv_cache import check, workload_of
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.valkey import Valkey

MORE = {"max_position_embeddings": 512, "num_key_value_heads": 4}
MODELS: dict[str, Any] = {
    "wide heads": {**SMALL_CONFIGS["qwen3"], **MORE},
    "learned positions": {**SMALL_CONFIGS["opt"], "max_position_embeddings": 512},
    "fused": {**SMALL_CONFIGS["gpt2"], "n_positions": 512},
    "rotary and fused": {**SMALL_CONFIGS["gpt_neox"], **MORE},
    "mixed layers": {**SMALL_CONFIGS["gemma2"], **MORE, "sliding_window": 70},
    "our decoder": {
        **SMALL_CONFIGS["headroom_decoder"],
        **MORE,
        "layer_types": ["full", "local", "full"],
        "local_window": 80,
    },
}
CASES = (
    (KvCachePlan(place="host", prefetch=1, prefix_tokens=40), WeightsPlan(), (120, 8, 2), 1),
    (KvCachePlan(place="disk", prefetch=2, prefix_tokens=500), WeightsPlan(dtype="bf16", place="host"), (120, 5, 1), 2),
    (KvCachePlan(place="host", prefetch=0, prefix_tokens=2), WeightsPlan(place="disk", prefetch=0), (56, 5, 2), 2),
    (KvCachePlan(place="remote", prefetch=1, prefix_tokens=40), WeightsPlan(), (120, 6, 2), 2),
    (KvCachePlan(place="disk", prefetch=0, prefix_tokens=56), WeightsPlan(dtype="bf16"), (56, 1, 3), 1),
)
"""Cache, weights, prompt length, new tokens and batch of three sequences, micro-batches."""


@cache
def profiled(name: str) -> tuple[ModelSpec, GenerationProfile]:
    """A model's spec and its profile, traced once for all tests."""
    spec = read_model_spec(MODELS[name])
    return spec, profile_generation(spec, representations=("fp32", "bf16"))


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_copies_are_predicted_exactly(name: str, machine: Machine, tmp_path: Path, remote: Valkey) -> None:
    spec, profile = profiled(name)
    for kv_cache, weights, (prompt_length, num_new, batch), micro_batches in CASES:
        plan = GenerationPlan(batch_size=batch, num_micro_batches=micro_batches, weights=weights, kv_cache=kv_cache)
        check(spec, profile, machine, tmp_path, plan=plan, workload=workload_of(prompt_length, num_new))


def test_prompts_of_several_lengths_are_predicted_exactly(machine: Machine, tmp_path: Path) -> None:
    spec, profile = profiled("wide heads")
    workload = GenerationWorkload.of_prompts((90, 72, 71, 30, 20, 19), num_new_tokens=9)
    plan = GenerationPlan(
        batch_size=2, num_micro_batches=3, kv_cache=KvCachePlan(place="host", prefetch=2, prefix_tokens=40)
    )
    check(spec, profile, machine, tmp_path, plan=plan, workload=workload)


def predict(
    machine: Machine, *, name: str = "wide heads", prefix: int = 0, batch: int = 2, **choices: Any
) -> GenerationPrediction:
    plan = GenerationPlan(batch_size=batch, kv_cache=KvCachePlan(place="host", prefix_tokens=prefix, **choices))
    _, profile = profiled(name)
    return estimate_generation(profile, plan=plan, workload=workload_of(100, 3, batch), machine=machine)


def test_each_token_brings_hidden_states_in_place_of_what_they_make(machine: Machine) -> None:
    kept, again = predict(machine), predict(machine, prefix=60)
    less_by_token = 3 * 2 * (2 * 4 * 12 - 32) * 4
    less = {link: kept.copied_bytes[link] - again.copied_bytes[link] for link in kept.copied_bytes}
    assert less == {"device_to_host": 60 * less_by_token, "host_to_device": 2 * 60 * less_by_token}
    assert kept.host_peak_bytes - again.host_peak_bytes == 60 * less_by_token


def test_on_a_slow_link_it_takes_less_time_and_on_a_fast_one_more(machine: Machine) -> None:
    slow, fast = (
        replace(machine, rates=replace(machine.rates, host_to_device_bytes_per_s=rate, device_to_host_bytes_per_s=rate))
        for rate in (1e6, 1e12)
    )
    assert predict(slow, prefix=60).decode_ms < predict(slow).decode_ms
    assert predict(fast, prefix=60).decode_ms > predict(fast).decode_ms


def test_on_a_card_it_is_done_while_the_rest_comes() -> None:
    """Copies and compute are each as long as before or longer, and waiting is less than both one after the other."""
    card = table_machine("RTX 4090")
    card = replace(card, rates=replace(card.rates, host_to_device_bytes_per_s=1e8))
    kept, again = predict(card, prefetch=0), predict(card, prefix=50, prefetch=0)
    busy = again.lane_busy_ms
    assert busy["copy_in"] < kept.lane_busy_ms["copy_in"]
    assert again.decode_ms * 2 + again.prefill_ms < sum(busy.values())
    assert again.decode_ms < kept.decode_ms


@pytest.mark.parametrize("prefix", [40, 100])
def test_single_allocations_reach_the_same_peak(machine: Machine, prefix: int) -> None:
    _, profile = profiled("wide heads")
    plan = GenerationPlan(
        batch_size=4, num_micro_batches=2, kv_cache=KvCachePlan(place="host", prefetch=2, prefix_tokens=prefix)
    )
    workload = workload_of(100, 60, 8)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    found = list_generation_allocations(profile, plan=plan, workload=workload, machine=machine)
    assert found.peak_bytes == predicted.device_peak_bytes


def test_a_deep_models_process_is_worked_out_from_fewer_blocks() -> None:
    spec = read_model_spec({**MODELS["wide heads"], "num_hidden_layers": 30})
    profile = profile_generation(spec, representations=("fp32",))
    plan = GenerationPlan(batch_size=4, kv_cache=KvCachePlan(place="host", prefix_tokens=50))
    machine, workload = table_machine("RTX 4090"), workload_of(100, 20, 4)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    found = add_generation_memory(predicted, profile, plan=plan, workload=workload, machine=machine)
    assert found.memory is not None
    assert found.memory.process.high > predicted.device_peak_bytes


@pytest.mark.parametrize(("name", "why"), [("llama", "weighs 128 B"), ("mistral", "all blocks of this model have a sliding")])
def test_a_model_that_gains_nothing_is_refused(name: str, why: str, machine: Machine) -> None:
    profile = profile_generation(read_model_spec(SMALL_CONFIGS[name]), representations=("fp32",))
    assert profile.rebuild is None
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", prefix_tokens=4))
    with pytest.raises(InvalidPlan, match=why):
        estimate_generation(profile, plan=plan, workload=workload_of(20, 5, 1), machine=machine)
