"""The first step, the steady step and the evaluation, each held to the meter."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.estimate.prediction import Prediction
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
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure_stages import measure_stages
from optimizer.workload import Adapter, TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.profiles import extent_of, trace

NUM_BLOCKS = 3
HOST_GRADIENTS = {"gradients": GradientsPlan(choice="host")}
ON_HOST: dict[str, Any] = {**HOST_GRADIENTS, "optimizer_state": OptimizerStatePlan(place="host")}
ON_DISK: dict[str, Any] = {**HOST_GRADIENTS, "optimizer_state": OptimizerStatePlan(place="disk")}
BF16 = WeightsPlan(dtype="bf16")
CONSUME = {"gradients": GradientsPlan(choice="consume")}
EIGHT_BITS = {"optimizer_state": OptimizerStatePlan(bits=8)}
PLANS: dict[str, Any] = {
    "plain": {},
    "recomputed": {"activations": "recompute"},
    "offloaded": {"activations": "offload"},
    "accumulated": {"batch": BatchPlan(micro_batch_size=2, accumulation_steps=3)},
    "in chunks": {"logits_and_loss": LogitsAndLossPlan(num_chunks=3)},
    "in chunks under autocast": {
        "logits_and_loss": LogitsAndLossPlan(num_chunks=3),
        "weights": WeightsPlan(autocast="bf16"),
    },
    "8 bits": EIGHT_BITS,
    "8 bits, consumed": {**EIGHT_BITS, **CONSUME},
    "bf16": {"weights": BF16},
    "bf16, 8 bits, in chunks": {"weights": BF16, **EIGHT_BITS, "logits_and_loss": LogitsAndLossPlan(num_chunks=2)},
    "consumed": CONSUME,
    "bf16, consumed": {"weights": BF16, **CONSUME},
    "fp16, gradients on the host": {"weights": WeightsPlan(dtype="fp16"), **HOST_GRADIENTS},
    "half the state on the host": {**HOST_GRADIENTS, "optimizer_state": OptimizerStatePlan(place="host", fraction=0.5)},
    "streamed": {**ON_HOST, "weights": WeightsPlan(place="host")},
    "streamed from the disk, bf16": {**ON_DISK, "weights": WeightsPlan(place="disk", dtype="bf16", prefetch=0)},
}
SPARE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 134,
    "max_position_embeddings": 128,
}


def make_plan(name: str) -> Plan:
    columns = {"batch": BatchPlan(micro_batch_size=3, accumulation_steps=1), **PLANS[name]}
    choice = columns.get("activations", "keep")
    return Plan(**columns | {"activations": ActivationsPlan(per_block=(choice,) * NUM_BLOCKS)})


def make_workload(plan: Plan, **changes: Any) -> TrainingWorkload:
    given = {
        "sequence_length": 24,
        "global_batch_size": plan.batch.global_batch_size,
        "max_grad_norm": None if plan.gradients.choice == "consume" else 1.0,
        "eval_batches": 2,
    }
    return TrainingWorkload(**given | changes)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trace_for(spec: ModelSpec, *plans: Any, **workload: Any) -> tuple[ModelSpec, Profile]:
    cases = [(plan, make_workload(plan, **workload)) for plan in plans]
    return spec, trace(spec, adapter=workload.get("adapter"), extent=extent_of(cases))


@pytest.fixture(scope="module")
def llama() -> tuple[ModelSpec, Profile]:
    return trace_for(read_model_spec(SPARE), *map(make_plan, PLANS))


def check(
    model: tuple[ModelSpec, Profile], machine: Machine, tmp_path: Path, plan: Plan, workload: TrainingWorkload
) -> None:
    spec, profile = model
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    measured = measure_stages(spec, plan=plan, workload=workload, scratch=tmp_path)
    assert [peak.stage for peak in predicted.peaks] == ["first_step", "steady_step", "evaluation"]
    for peak in predicted.peaks:
        counted = getattr(measured, peak.stage)
        assert peak.device_bytes_by_category == counted.device_bytes_by_category, peak.stage
        assert peak.device_peak_bytes == counted.device_bytes, peak.stage
        assert peak.moment == counted.moment, peak.stage


@pytest.mark.breadth
@pytest.mark.parametrize("name", PLANS)
def test_every_stage_takes_the_bytes_predicted(
    llama: tuple[ModelSpec, Profile], machine: Machine, tmp_path: Path, name: str
) -> None:
    plan = make_plan(name)
    check(llama, machine, tmp_path, plan, make_workload(plan))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["plain", "bf16", "consumed"])
def test_sgd_too(
    llama: tuple[ModelSpec, Profile], machine: Machine, tmp_path: Path, name: str, momentum: float
) -> None:
    plan = make_plan(name)
    check(llama, machine, tmp_path, plan, make_workload(plan, optimizer="sgd", momentum=momentum))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_models_that_evaluate_with_other_kernels_than_they_train_with(
    machine: Machine, tmp_path: Path, name: str
) -> None:
    spec = read_model_spec(SMALL_CONFIGS[name])
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
        logits_and_loss=LogitsAndLossPlan(num_chunks=2),
        activations=ActivationsPlan(per_block=("recompute",) * spec.num_blocks),
    )
    model = trace_for(spec, plan, sequence_length=20)
    check(model, machine, tmp_path, plan, make_workload(plan, sequence_length=20))


def test_adapters_with_dropout_on_packed_weights(machine: Machine, tmp_path: Path) -> None:
    adapter = Adapter(rank=4, dropout=0.1)
    spec = read_model_spec(SPARE)
    plan = dataclasses.replace(make_plan("plain"), weights=WeightsPlan(dtype="bf16", frozen="int8"))
    check(trace_for(spec, plan, adapter=adapter), machine, tmp_path, plan, make_workload(plan, adapter=adapter))


def test_plain_sgd_on_fp32_takes_in_its_first_step_what_every_step_takes(
    llama: tuple[ModelSpec, Profile], machine: Machine
) -> None:
    plan = make_plan("plain")
    workload = make_workload(plan, optimizer="sgd", momentum=0.0)
    first, steady, _ = estimate_training(llama[1], plan=plan, workload=workload, machine=machine).peaks
    assert dataclasses.replace(first, stage="steady_step") == steady


@pytest.mark.parametrize("name", PLANS)
def test_a_first_step_is_never_higher_than_a_steady_one(
    llama: tuple[ModelSpec, Profile], machine: Machine, name: str
) -> None:
    plan = make_plan(name)
    first, steady, _ = estimate_training(llama[1], plan=plan, workload=make_workload(plan), machine=machine).peaks
    assert first.device_peak_bytes <= steady.device_peak_bytes


def test_a_job_of_one_step_has_no_steady_one(llama: tuple[ModelSpec, Profile], machine: Machine) -> None:
    plan = make_plan("plain")
    workload = make_workload(plan, num_steps=1)
    peaks = estimate_training(llama[1], plan=plan, workload=workload, machine=machine).peaks
    assert [peak.stage for peak in peaks] == ["first_step", "evaluation"]


def test_the_verdict_is_of_the_highest_stage(machine: Machine) -> None:
    """Streamed, in chunks, and evaluated on so many batches that their inputs are more than a step's activations."""
    plan = dataclasses.replace(
        make_plan("streamed"),
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        logits_and_loss=LogitsAndLossPlan(num_chunks=4),
    )
    workload = make_workload(plan, eval_batches=1000)
    _, profile = trace_for(read_model_spec(SPARE), plan)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    evaluation = predicted.peaks[-1].device_peak_bytes
    assert predicted.device_peak_bytes < evaluation == predicted.highest_peak_bytes <= predicted.device_peak_high_bytes
    assert predicted.verdict(evaluation - 1) == "does_not_fit"
    assert predicted.verdict(predicted.device_peak_high_bytes) == "fits"


def test_a_profile_that_traced_no_evaluation_says_nothing_of_one(
    llama: tuple[ModelSpec, Profile], machine: Machine
) -> None:
    profile = llama[1]
    regimes = {
        name: tuple(dataclasses.replace(regime, evaluation=None) for regime in regimes)
        for name, regimes in profile.regimes.items()
    }
    old = dataclasses.replace(profile, regimes=regimes)
    plan = make_plan("plain")
    peaks = estimate_training(old, plan=plan, workload=make_workload(plan), machine=machine).peaks
    assert [peak.stage for peak in peaks] == ["first_step", "steady_step"]


def test_stages_and_evaluation_parts_survive_json(llama: tuple[ModelSpec, Profile], machine: Machine) -> None:
    plan = make_plan("plain")
    assert Profile.from_json(llama[1].to_json()) == llama[1]
    predicted = estimate_training(llama[1], plan=plan, workload=make_workload(plan), machine=machine)
    assert Prediction.from_json(predicted.to_json()) == predicted
