"""Every architecture is predicted to the byte: encoders, encoders with a decoder, and decoders unlike Llama."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.workload import TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

MODELS: dict[str, Any] = {
    "one head of keys and values, attention beside the mlp": SMALL_CONFIGS["falcon"],
    "experts in some blocks": {**SMALL_CONFIGS["qwen3_moe"], "mlp_only_layers": [0], "num_hidden_layers": 2},
    "encoder, nothing tied": {**SMALL_CONFIGS["electra"], "tie_word_embeddings": False},
    "encoder and decoder": SMALL_CONFIGS["bart"],
    "encoder and decoder, relative positions": SMALL_CONFIGS["t5"],
}
"""One of each way in which parts lie: every other type was swept alike, and differs from one of these in sizes only."""


EXTENTS = {
    "fp32": Extent(representations=("fp32",), shapes=((2, 24), (2, 40))),
    "bf16": Extent(representations=("bf16",), shapes=((1, 24),)),
}


@pytest.fixture(scope="module")
def machine() -> Machine:
    return make_cpu_machine()


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> tuple[ModelSpec, dict[str, Profile]]:
    spec = read_model_spec(MODELS[request.param])
    return spec, {dtype: profile_model(spec, extent=extent) for dtype, extent in EXTENTS.items()}


def list_choices(num_blocks: int) -> Iterator[tuple[str, ...]]:
    """Each choice alone, and mixtures of all."""
    rng = random.Random(num_blocks)
    yield from ((choice,) * num_blocks for choice in BLOCK_CHOICES)
    for _ in range(2):
        yield tuple(rng.choice(BLOCK_CHOICES) for _ in range(num_blocks))


def check(
    subject: tuple[ModelSpec, dict[str, Profile]],
    machine: Machine,
    *,
    per_block: tuple[str, ...],
    length: int = 24,
    batch: tuple[int, int] = (2, 1),
    **rows: Any,
) -> None:
    spec, profiles = subject
    plan = Plan(
        batch=BatchPlan(micro_batch_size=batch[0], accumulation_steps=batch[1]),
        activations=ActivationsPlan(per_block=per_block),
        **rows,
    )
    workload = TrainingWorkload(sequence_length=length, global_batch_size=plan.batch.global_batch_size)
    predicted = estimate_training(profiles[plan.weights.dtype], plan=plan, workload=workload, machine=machine)
    measured = measure_step(spec, plan=plan, workload=workload)
    assert predicted.device_peak_bytes == measured.device_peak_bytes, plan
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category, plan
    assert predicted.host_peak_bytes == measured.host_peak_bytes, plan
    assert predicted.copied_bytes == measured.copied_bytes, plan


def test_every_choice_and_their_mixtures_are_predicted_to_the_byte(
    subject: tuple[ModelSpec, dict[str, Profile]], machine: Machine
) -> None:
    for index, per_block in enumerate(list_choices(subject[0].num_blocks)):
        if index % 2:
            check(subject, machine, per_block=per_block, batch=(1, 2), weights=WeightsPlan(dtype="bf16"))
        else:
            check(subject, machine, per_block=per_block, length=40)


def test_weights_that_stream_past_both_stacks_are_predicted_to_the_byte(
    subject: tuple[ModelSpec, dict[str, Profile]], machine: Machine
) -> None:
    rows = {
        "weights": WeightsPlan(place="host"),
        "gradients": GradientsPlan(choice="host"),
        "optimizer_state": OptimizerStatePlan(place="host"),
    }
    per_block = ("recompute", "keep") * subject[0].num_blocks
    check(subject, machine, per_block=per_block[: subject[0].num_blocks], batch=(2, 2), **rows)


def test_a_head_that_is_more_than_a_projection_is_not_cut(
    subject: tuple[ModelSpec, dict[str, Profile]], machine: Machine
) -> None:
    spec, profile = subject[0], subject[1]["fp32"]
    if profile.has_plain_head:
        pytest.skip("a plain projection")
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",) * spec.num_blocks),
        logits_and_loss=LogitsAndLossPlan(num_chunks=2),
    )
    workload = TrainingWorkload(sequence_length=24, global_batch_size=2)
    message = "needs a head that is one projection"
    with pytest.raises(InvalidPlan, match=message):
        estimate_training(profile, plan=plan, workload=workload, machine=machine)
    with pytest.raises(InvalidPlan, match=message):
        measure_step(spec, plan=plan, workload=workload)


def test_fp16_is_not_priced_where_blocks_do_more_in_it(machine: Machine) -> None:
    spec = read_model_spec(SMALL_CONFIGS["t5"])
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",) * spec.num_blocks),
        weights=WeightsPlan(dtype="fp16"),
    )
    conflict = plan.find_conflict(TrainingWorkload(sequence_length=24, global_batch_size=2), clamps_fp16=True)
    assert conflict is not None
    assert str(conflict) == (
        "weights dtype is fp16, which makes this model's blocks clamp their values; use bf16, or fp32 with autocast"
    )
