"""Packed and moved caches are priced to the byte and to the copy, and their time grows as it should."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.estimate.generation.process import list_generation_allocations
from optimizer.formats.transfer_sizes import STAGING_BYTES
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.valkey import Valkey

POSITIONS = {"max_position_embeddings": 512}
MODELS: dict[str, Any] = {
    "grouped queries": {**SMALL_CONFIGS["qwen3"], **POSITIONS},
    "learned positions": {**SMALL_CONFIGS["opt"], **POSITIONS},
    "fused": {**SMALL_CONFIGS["gpt2"], "n_positions": 512},
    "sliding window": {**SMALL_CONFIGS["mistral"], **POSITIONS, "sliding_window": 100},
    "mixed layers": {**SMALL_CONFIGS["gemma2"], **POSITIONS, "sliding_window": 70},
    "experts": {**SMALL_CONFIGS["mixtral"], **POSITIONS},
    "our decoder": {
        **SMALL_CONFIGS["headroom_decoder"],
        **POSITIONS,
        "layer_types": ["full", "local", "full"],
        "local_window": 80,
    },
}
CACHES = tuple(
    KvCachePlan(dtype=dtype, place=place, prefetch=prefetch)
    for dtype in ("same", "int8", "int4")
    for place, prefetch in (("device", 1), ("host", 1), ("host", 0), ("disk", 2), ("remote", 1), ("remote", 0))
)[1:]
ON_HOST = KvCachePlan(place="host", attention="host")
WEIGHTS = (WeightsPlan(), WeightsPlan(dtype="bf16", place="host"), WeightsPlan(place="disk", prefetch=0))
SHAPES = ((120, 12, 2), (128, 3, 3), (56, 14, 1))
"""Prompt length, new tokens, batch, of three sequences."""


@cache
def profiled(name: str) -> tuple[ModelSpec, GenerationProfile]:
    """A model's spec and its profile, traced once for all tests."""
    spec = read_model_spec(MODELS[name])
    return spec, profile_generation(spec, representations=("fp32", "bf16"))


def workload_of(prompt_length: int, num_new_tokens: int, num_sequences: int = 3) -> GenerationWorkload:
    return GenerationWorkload(
        prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=num_sequences
    )


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_copies_are_predicted_exactly(name: str, machine: Machine, tmp_path: Path, remote: Valkey) -> None:
    """Models take turns with the caches, the weights and the shapes, so that together they have all."""
    spec, profile = profiled(name)
    place = list(MODELS).index(name)
    for turn in range(4 * place, 4 * place + 4):
        kv_cache, weights = CACHES[turn % len(CACHES)], WEIGHTS[turn % len(WEIGHTS)]
        prompt_length, num_new, batch = SHAPES[(turn // 3) % len(SHAPES)]
        plan = GenerationPlan(
            batch_size=batch, num_micro_batches=1 + (turn % 2) * (batch < 3), weights=weights, kv_cache=kv_cache
        )
        check(spec, profile, machine, tmp_path, plan=plan, workload=workload_of(prompt_length, num_new))


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_copies_of_attention_on_the_host_are_predicted_exactly(
    name: str, machine: Machine, tmp_path: Path
) -> None:
    """Each model with all weights and shapes, in turn."""
    spec, profile = profiled(name)
    for weights, (prompt_length, num_new, batch) in zip(WEIGHTS, SHAPES, strict=True):
        for num_micro_batches in (1, 2)[: 1 + (batch < 3)]:
            plan = GenerationPlan(
                batch_size=batch, num_micro_batches=num_micro_batches, weights=weights, kv_cache=ON_HOST
            )
            check(spec, profile, machine, tmp_path, plan=plan, workload=workload_of(prompt_length, num_new))


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("dtype", "place", "attention"),
    [
        ("same", "host", "device"),
        ("int8", "disk", "device"),
        ("same", "remote", "device"),
        ("int4", "remote", "device"),
        ("int4", "device", "device"),
        ("int4", "host", "device"),
        ("same", "host", "host"),
    ],
)
def test_micro_batches_of_mixed_lengths_are_predicted_exactly(
    dtype: str, place: str, attention: str, machine: Machine, tmp_path: Path, remote: Valkey
) -> None:
    spec, profile = profiled("mixed layers")
    workload = GenerationWorkload(
        prompt_lengths=(130, 128, 90, 72, 71, 70, 30, 20, 19), prompt_length=130, num_new_tokens=9, num_sequences=9
    )
    plan = GenerationPlan(
        batch_size=2,
        num_micro_batches=3,
        kv_cache=KvCachePlan(dtype=dtype, place=place, prefetch=2, attention=attention),
    )
    check(spec, profile, machine, tmp_path, plan=plan, workload=workload)


def check(
    spec: ModelSpec,
    profile: GenerationProfile,
    machine: Machine,
    tmp_path: Path,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
) -> None:
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    measured = measure_generation(spec, plan=plan, workload=workload, scratch=tmp_path)
    what = (plan, workload)
    assert predicted.device_peak_bytes == measured.device_peak_bytes, what
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category, what
    assert predicted.peak_moment == measured.peak_moment, what
    assert predicted.host_peak_bytes == measured.host_peak_bytes, what
    assert predicted.disk_peak_bytes == measured.disk_peak_bytes, what
    assert predicted.remote_peak_bytes == measured.remote_peak_bytes, what
    assert predicted.copied_bytes == measured.copied_bytes, what


# One profile for the rest.


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    config = {**SMALL_CONFIGS["llama"], "max_position_embeddings": 4096, "num_hidden_layers": 6}
    return profile_generation(read_model_spec(config), representations=("fp32",))


def predict(
    profile: GenerationProfile,
    machine: Machine,
    *,
    prompt_length: int = 1000,
    num_new: int = 200,
    batch: int = 16,
    **choices: Any,
) -> GenerationPrediction:
    plan = GenerationPlan(batch_size=batch, kv_cache=KvCachePlan(**choices))
    workload = workload_of(prompt_length, num_new, batch)
    return estimate_generation(profile, plan=plan, workload=workload, machine=machine)


def test_packing_and_moving_take_memory_off_the_device_and_time(profile: GenerationProfile, machine: Machine) -> None:
    plain = predict(profile, machine)
    packed = predict(profile, machine, dtype="int4")
    moved = predict(profile, machine, place="host")
    both = predict(profile, machine, dtype="int4", place="host")
    assert plain.decode_ms < both.decode_ms < moved.decode_ms or plain.decode_ms < packed.decode_ms < both.decode_ms
    peaks = [each.device_peak_bytes for each in (plain, packed, moved, both)]
    assert peaks[0] > peaks[1] > peaks[3]
    assert peaks[0] > peaks[2]
    assert moved.host_peak_bytes == plain.kv_cache_bytes
    assert both.host_peak_bytes < 0.3 * moved.host_peak_bytes


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_each_token_brings_those_before_it_and_sends_itself(
    profile: GenerationProfile, machine: Machine, place: str
) -> None:
    predicted = predict(profile, machine, prompt_length=100, num_new=3, batch=2, place=place)
    by_token = 6 * 2 * 2 * 2 * 8 * 4
    assert predicted.copied_bytes == {
        "device_to_host": 102 * by_token,
        f"host_to_{place}": 102 * by_token,
        f"{place}_to_host": (100 + 101) * by_token,
        "host_to_device": (100 + 101) * by_token,
    }


def test_the_remote_store_holds_them_instead_of_the_host_and_its_link_takes_the_time(
    profile: GenerationProfile, machine: Machine
) -> None:
    slow = replace(machine, rates=replace(machine.rates, remote_read_bytes_per_s=1e8, remote_write_bytes_per_s=1e8))
    host, remote = predict(profile, slow, place="host"), predict(profile, slow, place="remote")
    assert remote.remote_peak_bytes == host.host_peak_bytes == host.kv_cache_bytes
    assert (host.remote_peak_bytes, remote.host_peak_bytes) == (0, STAGING_BYTES)
    assert remote.device_peak_bytes == host.device_peak_bytes
    crossed = remote.copied_bytes["remote_to_host"] + remote.copied_bytes["host_to_remote"]
    assert remote.lane_busy_ms["network"] == pytest.approx(crossed / 1e8 * 1000, rel=1e-6)
    # The CPU device waits for what comes, and not for what leaves.
    waits_s = remote.copied_bytes["remote_to_host"] / 1e8
    assert remote.total_s - host.total_s == pytest.approx(waits_s, rel=0.02)


def test_each_coming_from_the_remote_store_costs_a_round_trip_as_far_as_its_rate_does_not_hold_it(
    profile: GenerationProfile, machine: Machine
) -> None:
    measured = replace(machine.rates, remote_read_bytes_per_s=1e9, remote_write_bytes_per_s=1e9)
    near, far = (
        replace(machine, rates=replace(measured, remote_round_trip_s=round_trip_s)) for round_trip_s in (None, 1e-2)
    )
    # A batch of one brings almost all of it; 16 sequences of 1,100 tokens bring a staging buffer and more.
    for batch, prompt_length, share in ((1, 20, 1.0), (16, 1100, 0.0)):
        shape = {"prompt_length": prompt_length, "num_new": 5, "batch": batch, "place": "remote", "prefetch": 0}
        quick, slow = (predict(profile, each, **shape) for each in (near, far))
        assert slow.decode_ms - quick.decode_ms == pytest.approx(share * 6 * 10, rel=0.01, abs=0.6)


def test_time_of_a_packed_cache_is_summed_from_a_few_dozen_prices(profile: GenerationProfile, machine: Machine) -> None:
    predicted = predict(profile, machine, prompt_length=100, num_new=2000, dtype="int4", place="host")
    assert len(predicted.decode) < 100


@pytest.mark.parametrize(("dtype", "place"), [("same", "host"), ("int8", "disk"), ("int4", "device")])
def test_single_allocations_reach_the_same_peak(
    profile: GenerationProfile, machine: Machine, dtype: str, place: str
) -> None:
    plan = GenerationPlan(batch_size=4, num_micro_batches=2, kv_cache=KvCachePlan(dtype=dtype, place=place, prefetch=2))
    workload = workload_of(100, 60, 8)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    found = list_generation_allocations(profile, plan=plan, workload=workload, machine=machine)
    assert found.peak_bytes == predicted.device_peak_bytes
    kv_bytes = sum(held.num_bytes for held in found.at_peak if held.category == "kv_cache")
    assert kv_bytes == predicted.device_bytes_by_category["kv_cache"]


def test_a_prompt_makes_no_room_for_what_comes_ahead(profile: GenerationProfile, machine: Machine) -> None:
    without, ahead = (predict(profile, machine, num_new=1, place="host", prefetch=each) for each in (0, 4))
    assert without.device_peak_bytes == ahead.device_peak_bytes


@pytest.mark.parametrize("place", ["device", "host"])
def test_each_coming_of_keys_and_values_costs_its_python(machine: Machine, place: str) -> None:
    _, profile = profiled("learned positions")
    moving = replace(machine, rates=replace(machine.rates, python_s={"keys and values": 1e-3}))
    plan = GenerationPlan(batch_size=3, kv_cache=KvCachePlan(place=place))
    plain, told = (
        estimate_generation(profile, plan=plan, workload=workload_of(20, 5), machine=each) for each in (machine, moving)
    )
    expected_ms = profile.num_blocks * 5 if place == "host" else 0
    assert (told.total_s - plain.total_s) * 1000 == pytest.approx(expected_ms, abs=1e-6)
