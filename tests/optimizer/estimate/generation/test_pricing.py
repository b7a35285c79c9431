"""Predicted bytes of a generation equal the meter's, and its time is the sum of every token's."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.estimate.generation.kv.cache import list_kv_bytes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.job.measure_generation import measure_generation
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

MODELS: dict[str, Any] = {
    "grouped queries": SMALL_CONFIGS["qwen3"],
    "one group, tied embeddings": {**SMALL_CONFIGS["gemma"], "num_key_value_heads": 1},
    "learned positions, narrow embedding": SMALL_CONFIGS["opt"],
    "sliding window": SMALL_CONFIGS["mistral"],
    "mixed layers": SMALL_CONFIGS["gemma2"],
    "experts": SMALL_CONFIGS["mixtral"],
    "our decoder": {**SMALL_CONFIGS["headroom_decoder"], "layer_types": ["full", "local", "full"]},
    "our decoder, shared blocks": {
        **SMALL_CONFIGS["headroom_decoder"],
        "layer_types": ["full", "full", "full"],
        "share_every": 2,
        "positions": "learned",
    },
}
WEIGHTS = (
    WeightsPlan(dtype="bf16", place="host"),
    WeightsPlan(frozen="int8", place="host", prefetch=2),
    WeightsPlan(dtype="bf16", frozen="nf4"),
    WeightsPlan(dtype="bf16", place="disk", prefetch=0),
)
"""Models take turns with these, beside plain fp32, so that together they have all."""
SHAPES = ((16, 12, 3), (24, 9, 1), (32, 1, 2))
"""Prompt length, new tokens, batch, of three sequences; windows are 16 and 12."""


def both_weights(name: str) -> tuple[WeightsPlan, WeightsPlan]:
    return WeightsPlan(), WEIGHTS[list(MODELS).index(name) % len(WEIGHTS)]


@cache
def profiled(name: str) -> tuple[ModelSpec, GenerationProfile]:
    """A model's spec and its profile, traced once for all tests."""
    spec = read_model_spec(MODELS[name])
    return spec, profile_generation(spec, representations=[weights.representation for weights in both_weights(name)])


def workload_of(prompt_length: int, num_new_tokens: int, num_sequences: int = 3) -> GenerationWorkload:
    return GenerationWorkload(
        prompt_length=prompt_length, num_new_tokens=num_new_tokens, num_sequences=num_sequences
    )


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
    assert predicted.device_peak_bytes == measured.device_peak_bytes, plan
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category, plan
    assert predicted.peak_moment == measured.peak_moment, plan
    assert predicted.host_peak_bytes == measured.host_peak_bytes, plan
    assert predicted.disk_peak_bytes == measured.disk_peak_bytes, plan
    assert predicted.remote_peak_bytes == measured.remote_peak_bytes, plan
    assert predicted.copied_bytes == measured.copied_bytes, plan


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_generations_are_predicted_to_the_byte(name: str, machine: Machine, tmp_path: Path) -> None:
    spec, profile = profiled(name)
    for weights in both_weights(name):
        for prompt_length, num_new, batch in SHAPES:
            plan = GenerationPlan(batch_size=batch, weights=weights)
            check(spec, profile, machine, tmp_path, plan=plan, workload=workload_of(prompt_length, num_new))


@pytest.mark.parametrize("name", ["mixed layers", "sliding window"])
def test_a_window_is_crossed_to_the_byte(name: str, machine: Machine, tmp_path: Path) -> None:
    spec, profile = profiled(name)
    for prompt_length, num_new in ((2, 30), (14, 3), (15, 2), (16, 2), (17, 2)):
        workload = workload_of(prompt_length, num_new)
        check(spec, profile, machine, tmp_path, plan=GenerationPlan(batch_size=2), workload=workload)


def test_a_cache_larger_than_all_else_makes_decoding_the_peak(machine: Machine, tmp_path: Path) -> None:
    spec = read_model_spec({**SMALL_CONFIGS["gemma2"], "max_position_embeddings": 96})
    profile = profile_generation(spec, representations=("fp32",))
    plan, workload = GenerationPlan(batch_size=2, weights=WeightsPlan(place="host")), workload_of(4, 60, 2)
    check(spec, profile, machine, tmp_path, plan=plan, workload=workload)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    assert predicted.peak_moment.startswith("decode (token 60)")


# One profile for the rest.


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model_spec({**SMALL_CONFIGS["gemma2"], "max_position_embeddings": 4096, "sliding_window": 64})


@pytest.fixture(scope="module")
def profile(spec: ModelSpec) -> GenerationProfile:
    return profile_generation(spec, representations=("fp32", "bf16"))


def test_time_is_the_sum_of_every_tokens(profile: GenerationProfile, machine: Machine) -> None:
    workload = workload_of(40, 90, 2)
    plan = GenerationPlan(batch_size=2, weights=WeightsPlan(place="host"))
    whole = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    total_ms = 0.0
    for token in range(2, 91):
        until = estimate_generation(profile, plan=plan, workload=workload_of(38 + token, 2, 2), machine=machine)
        assert until.decode[0].num_tokens == 39 + token
        assert until.decode_ms == pytest.approx(whole.decode_step_ms(39 + token), rel=1e-6)
        total_ms += until.decode_ms
    assert whole.decode_ms * 89 == pytest.approx(total_ms, rel=1e-6)
    assert len(whole.decode) < 30


def test_times_by_kind_and_lane_sum_to_the_pass(profile: GenerationProfile, machine: Machine) -> None:
    plan = GenerationPlan(weights=WeightsPlan(place="disk"))
    predicted = estimate_generation(profile, plan=plan, workload=workload_of(40, 90, 2), machine=machine)
    assert sum(predicted.prefill_by_kind_ms.values()) == pytest.approx(predicted.prefill_ms)
    assert sum(predicted.decode_by_kind_ms.values()) == pytest.approx(89 * predicted.decode_ms)
    assert predicted.total_s * 1000 == pytest.approx(2 * (predicted.prefill_ms + 89 * predicted.decode_ms))
    assert predicted.tokens_per_s == pytest.approx(180 / predicted.total_s)


def test_a_last_pass_with_fewer_sequences_takes_its_own_time(profile: GenerationProfile, machine: Machine) -> None:
    plan = GenerationPlan(batch_size=3)
    seven, six, one = (
        estimate_generation(profile, plan=GenerationPlan(batch_size=size), workload=workload_of(20, 5, number), machine=machine)
        for size, number in ((plan.batch_size, 7), (plan.batch_size, 6), (1, 1))
    )
    assert seven.total_s == pytest.approx(six.total_s + one.total_s)
    assert seven.device_peak_bytes == six.device_peak_bytes


def test_each_token_brings_the_streamed_weights_once(profile: GenerationProfile, machine: Machine) -> None:
    plan = GenerationPlan(batch_size=2, weights=WeightsPlan(dtype="bf16", place="disk"))
    predicted = estimate_generation(profile, plan=plan, workload=workload_of(20, 5, 4), machine=machine)
    num_bytes = sum(profile.weight_bytes("bf16").by_block)
    assert predicted.copied_bytes_per_token == {"disk_to_host": num_bytes, "host_to_device": num_bytes}
    assert predicted.copied_bytes_per_pass == {"disk_to_host": 5 * num_bytes, "host_to_device": 5 * num_bytes}
    assert predicted.copied_bytes == {"disk_to_host": 10 * num_bytes, "host_to_device": 10 * num_bytes}


def test_the_cache_is_heads_times_tokens_within_the_window(profile: GenerationProfile) -> None:
    plan = GenerationPlan(batch_size=5, weights=WeightsPlan(dtype="bf16"))
    by_token = 5 * 2 * 2 * 8 * 2
    by_block = list_kv_bytes(profile, plan, batch_size=5, num_tokens=100)
    assert by_block == (by_token * 64, by_token * 100, by_token * 64)


def test_finished_runs_correct_the_time_and_not_the_bytes(profile: GenerationProfile, machine: Machine) -> None:
    plain, twice = (
        estimate_generation(
            profile, plan=GenerationPlan(), workload=workload_of(20, 5), machine=machine, calibration=calibration
        )
        for calibration in (None, {"step_time_factor": 2.0})
    )
    assert twice.total_s == pytest.approx(2 * plain.total_s, rel=0.02)
    assert twice.device_peak_bytes == plain.device_peak_bytes


def test_it_survives_json(profile: GenerationProfile, machine: Machine) -> None:
    predicted = estimate_generation(profile, plan=GenerationPlan(), workload=workload_of(20, 50), machine=machine)
    assert GenerationPrediction.from_json(json.loads(json.dumps(predicted.to_json()))) == predicted


def test_the_timeline_reaches_the_peak_and_never_goes_beyond(profile: GenerationProfile, machine: Machine) -> None:
    predicted = estimate_generation(
        profile, plan=GenerationPlan(batch_size=3), workload=workload_of(20, 500), machine=machine
    )
    totals = [sum(point.bytes_by_category.values()) for point in predicted.timeline]
    offsets = [point.offset_ms for point in predicted.timeline]
    assert max(totals) == predicted.device_peak_bytes
    assert offsets == sorted(offsets)
    assert len(totals) <= 400


def test_what_cannot_be_carried_out_is_not_priced(profile: GenerationProfile, machine: Machine) -> None:
    with pytest.raises(InvalidPlan, match="batch size is 4"):
        estimate_generation(profile, plan=GenerationPlan(batch_size=4), workload=workload_of(20, 5), machine=machine)
    with pytest.raises(InvalidWorkload, match="make 4,097 tokens; this model has positions for 4,096"):
        estimate_generation(profile, plan=GenerationPlan(), workload=workload_of(4000, 97), machine=machine)
    packed = GenerationPlan(weights=WeightsPlan(dtype="bf16", frozen="nf4"))
    with pytest.raises(InvalidPlan, match="plan.weights are bf16/nf4"):
        estimate_generation(profile, plan=packed, workload=workload_of(20, 5), machine=machine)


def test_drawing_a_token_takes_what_was_measured_for_the_vocabulary(
    profile: GenerationProfile, machine: Machine
) -> None:
    vocab_size = profile.vocab_size
    told = replace(machine, rates=replace(machine.rates, op_curves={"draw": ((float(vocab_size), vocab_size / 2e-3),)}))
    rest = replace(told, rates=replace(told.rates, op_curves={"draw": ((float(vocab_size), vocab_size / 1e-3),)}))
    workload = replace(workload_of(20, 5), draws=True)
    twice, once = (
        estimate_generation(profile, plan=GenerationPlan(batch_size=3), workload=workload, machine=each) for each in (told, rest)
    )
    assert (twice.total_s - once.total_s) * 1000 == pytest.approx(3 * 5 * 1.0)
