"""Passes of several micro-batches, of prompts of several lengths, and of sequences that draw are predicted to the byte."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.formats.sampling import Sampling
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.arrange import list_passes, num_steps_of, passes_of
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.trace.generation import profile_generation
from optimizer.runtime.generation.run_requests import Request, open_generator, run_requests
from optimizer.workload import GenerationWorkload
from tests.optimizer.estimate.generation.test_pricing import MODELS, check

LENGTHS = ((20, 20, 20, 20, 20), (31, 9, 12, 10, 22), (8, 40, 9, 16))
"""Windows are 16 and 12."""
NUM_PLANS = 3
REPRESENTATIONS = ("fp32", "bf16/int4", "fp32/int8", "bf16", "fp32/int4", "bf16/nf4")
"""Models take turns with these."""
STREAMED = WeightsPlan(place="host")


def draw_plan(
    random: Random, *, num_sequences: int, representations: tuple[str, ...], can_cut_prompts: bool
) -> GenerationPlan:
    dtype, _, form = random.choice(representations).partition("/")
    batch_size = random.randint(1, 4)
    return GenerationPlan(
        batch_size=batch_size,
        num_micro_batches=random.randint(1, -(-num_sequences // batch_size)),
        prefill_tokens=random.choice((None, 2, 5)) if can_cut_prompts else None,
        weights=WeightsPlan(
            dtype=dtype,
            frozen=form or "same",
            place=random.choice(("device", "host", "host", "disk")),
            prefetch=random.randint(0, 2),
        ),
    )


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_are_predicted_to_the_byte(name: str, machine: Machine, tmp_path: Path) -> None:
    random = Random(name)
    spec = read_model_spec(MODELS[name])
    representations = (REPRESENTATIONS[list(MODELS).index(name) % len(REPRESENTATIONS)],)
    profile = profile_generation(spec, representations=representations)
    for index in range(NUM_PLANS):
        # Our decoder's local attention is traced from two whole blocks on.
        multiple = profile.prefill.length_multiple
        least = 2 * multiple if multiple > 1 else 1
        lengths = tuple(max(least, length // multiple * multiple) for length in LENGTHS[index % len(LENGTHS)])
        num_new = random.choice((1, 4, 9)) if index < NUM_PLANS - 1 else [random.choice((1, 3, 9, 20)) for _ in lengths]
        workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=num_new, draws=random.random() < 0.4)
        plan = draw_plan(
            random, num_sequences=len(lengths), representations=representations, can_cut_prompts=multiple == 1
        )
        check(spec, profile, machine, tmp_path, plan=plan, workload=workload)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model_spec({**MODELS["mixed layers"], "max_position_embeddings": 4096, "sliding_window": 64})


@pytest.fixture(scope="module")
def profile(spec: ModelSpec) -> GenerationProfile:
    return profile_generation(spec, representations=("fp32",))


def test_the_peak_of_few_sequences_that_outlast_the_others_is_predicted_to_the_byte(
    spec: ModelSpec, profile: GenerationProfile, machine: Machine, tmp_path: Path
) -> None:
    workload = GenerationWorkload.of_prompts((8, 4, 4, 6, 5), num_new_tokens=(56, 58, 3, 2, 5))
    plan = GenerationPlan(batch_size=5, weights=STREAMED)
    [((shape,), _)] = passes_of(plan, workload)
    assert shape.leaving == ((6, 2),)
    check(spec, profile, machine, tmp_path, plan=plan, workload=workload)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    assert predicted.peak_moment.startswith("decode (token")
    alone = replace(plan, kv_cache=KvCachePlan(place="host"))
    assert passes_of(alone, workload)[0][0][0].leaving == ()


def test_micro_batches_share_what_is_copied_in_a_step(profile: GenerationProfile, machine: Machine) -> None:
    workload = GenerationWorkload(prompt_length=20, num_new_tokens=5, num_sequences=12)
    block_bytes = sum(profile.weight_bytes("fp32").by_block[kind] for kind in profile.block_kinds)
    for num_micro_batches, num_passes in ((1, 6), (2, 3), (3, 2), (6, 1)):
        plan = GenerationPlan(batch_size=2, num_micro_batches=num_micro_batches, weights=STREAMED)
        predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
        assert predicted.copied_bytes_per_token == {"host_to_device": block_bytes}
        assert predicted.copied_bytes == {"host_to_device": 5 * num_passes * block_bytes}


def test_a_slow_link_is_paid_once_for_all_micro_batches(profile: GenerationProfile, machine: Machine) -> None:
    slow = replace(machine, rates=replace(machine.rates, host_to_device_bytes_per_s=1e5))
    workload = GenerationWorkload(prompt_length=20, num_new_tokens=5, num_sequences=12)
    apart, together = (
        estimate_generation(
            profile,
            plan=GenerationPlan(batch_size=2, num_micro_batches=number, weights=STREAMED),
            workload=workload,
            machine=slow,
        )
        for number in (1, 6)
    )
    assert together.total_s == pytest.approx(apart.total_s / 6, rel=0.05)
    assert together.kv_cache_bytes == 6 * apart.kv_cache_bytes


def test_time_of_prompts_that_differ_is_the_sum_of_their_passes(profile: GenerationProfile, machine: Machine) -> None:
    plan = GenerationPlan(batch_size=2, num_micro_batches=2, weights=STREAMED)
    lengths = (100, 95, 90, 70, 68, 65)
    workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=8)
    # 90 and 70 are further apart than what is generated.
    passes = list_passes(workload, batch_size=2, num_micro_batches=2)
    assert [[each.batch_size for each in shape] for shape, _ in passes] == [[2, 1], [2, 1]]
    whole = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    parts = [
        estimate_generation(
            profile,
            plan=replace(plan, num_micro_batches=number),
            workload=GenerationWorkload.of_prompts(part, num_new_tokens=8),
            machine=machine,
        )
        for part, number in ((lengths[:3], 2), (lengths[3:], 2))
    ]
    assert whole.total_s == pytest.approx(sum(part.total_s for part in parts))
    assert whole.device_peak_bytes == max(part.device_peak_bytes for part in parts)


def test_of_many_lengths_some_passes_are_priced_and_the_rest_lie_between(
    profile: GenerationProfile, machine: Machine
) -> None:
    random = Random(4)
    lengths = tuple(random.randint(30, 400) for _ in range(300))
    workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=40)
    plan = GenerationPlan(batch_size=4, num_micro_batches=3, weights=STREAMED)
    whole = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    passes = list_passes(workload, batch_size=4, num_micro_batches=3)
    assert len(passes) == 25
    every = []
    ordered = sorted(lengths, reverse=True)
    for start in range(0, 300, 12):
        part = GenerationWorkload.of_prompts(ordered[start : start + 12], num_new_tokens=40)
        every.append(estimate_generation(profile, plan=plan, workload=part, machine=machine))
    assert whole.total_s == pytest.approx(sum(each.total_s for each in every), rel=0.03)
    assert whole.device_peak_bytes == max(each.device_peak_bytes for each in every)
    num_steps = sum(count * num_steps_of(shape) for shape, count in passes)
    assert whole.copied_bytes["host_to_device"] == num_steps * whole.copied_bytes_per_token["host_to_device"]


def test_requests_that_generate_fewer_tokens_stay_under_the_predicted_peak(
    spec: ModelSpec, profile: GenerationProfile, machine: Machine
) -> None:
    random = Random(8)
    lengths = [random.choice((5, 9, 40, 41, 70, 72, 80)) for _ in range(20)]
    plan = GenerationPlan(batch_size=3, num_micro_batches=2, weights=STREAMED)
    workload = GenerationWorkload.of_prompts(lengths, num_new_tokens=20)
    predicted = estimate_generation(profile, plan=plan, workload=workload, machine=machine)
    requests = [
        Request(id=str(index), token_ids=(7,) * length, sampling=Sampling(max_new_tokens=random.randint(1, 20)))
        for index, length in enumerate(lengths)
    ]
    with open_generator(spec, plan=plan, cap_bytes=predicted.device_peak_bytes) as generator:
        result = run_requests(generator, requests, on_finished=lambda finished: None)
    assert result.num_finished == 20
    assert 0.8 * predicted.device_peak_bytes < result.device_peak_bytes <= predicted.device_peak_bytes


def test_a_micro_batch_that_would_be_empty_is_refused() -> None:
    workload = GenerationWorkload(prompt_length=20, num_new_tokens=5, num_sequences=4)
    plan = GenerationPlan(batch_size=2, num_micro_batches=3)
    with pytest.raises(InvalidPlan, match="number of micro batches is 3, which times 2 leaves the last one empty"):
        plan.check(workload=workload, max_sequence_length=64)
