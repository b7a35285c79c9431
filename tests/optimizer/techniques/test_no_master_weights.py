"""bf16 weights without fp32 masters under every technique: the bits of plain training so, and the predicted bytes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
from optimizer.estimate.training import estimate_training
from optimizer.models.spec import ModelSpec
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import TrainingWorkload
from tests.optimizer.techniques.checks import check_bytes
from tests.optimizer.techniques.plans import TECHNIQUES, make_plan, make_workload

MACHINE = make_cpu_machine()
PAIRED = ("recompute", "offload_disk", "accumulate", "consume", "gradients on host", "state on host", "weights on disk")


def without_masters(plan: Plan) -> Plan:
    return dataclasses.replace(plan, weights=dataclasses.replace(plan.weights, dtype="bf16", master="none"))


def list_cases() -> Iterator[Any]:
    seen = set()
    for names in [*((name,) for name in TECHNIQUES), *itertools.combinations(PAIRED, 2)]:
        plan = without_masters(make_plan(*names))
        if plan.fingerprint not in seen and plan.find_conflict(make_workload(plan)) is None:
            seen.add(plan.fingerprint)
            yield pytest.param(names, id=" and ".join(names))


@pytest.mark.breadth
@pytest.mark.parametrize("names", list(list_cases()))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_technique_gives_plain_trainings_bits_and_the_predicted_bytes(
    profile: Profile, measure: Callable[..., StepMeasurement], names: tuple[str, ...], optimizer: str
) -> None:
    plan = without_masters(make_plan(*names))
    workload = dataclasses.replace(make_workload(plan), optimizer=optimizer)
    plain = without_masters(dataclasses.replace(make_plan(), batch=plan.batch, logits_and_loss=plan.logits_and_loss))
    measured = measure(plan, workload)
    assert measured.weights_sha256 == measure(plain, workload).weights_sha256
    check_bytes(profile, plan, workload, measured, machine=MACHINE)


def test_with_8_bit_state_bytes_are_those_predicted(profile: Profile, measure: Callable[..., StepMeasurement]) -> None:
    for name in ("recompute", "consume", "gradients on host"):
        plan = dataclasses.replace(without_masters(make_plan(name)), optimizer_state=OptimizerStatePlan(bits=8))
        check_bytes(profile, plan, make_workload(plan), measure(plan, make_workload(plan)), machine=MACHINE)


def test_state_is_smaller_by_the_masters(profile: Profile) -> None:
    plan = without_masters(make_plan())
    masters = dataclasses.replace(plan, weights=WeightsPlan(dtype="bf16"))
    with_masters, without = (
        estimate_training(profile, plan=which, workload=make_workload(plan), machine=MACHINE).device_bytes_by_category
        for which in (masters, plan)
    )
    assert with_masters["optimizer_state"] - without["optimizer_state"] == 4 * profile.num_parameters


def test_it_changes_the_numbers_as_rounding_does() -> None:
    plan = without_masters(make_plan())
    assert plan.techniques == ("bf16", "no_master_weights")
    assert not plan.is_lossless


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_weights_keep_their_masters(dtype: str) -> None:
    with pytest.raises(InvalidPlan, match=rf"plan.weights.master is none with {dtype} weights; allowed: bf16 weights"):
        WeightsPlan(dtype=dtype, master="none")


@pytest.mark.parametrize("name", ["recompute", "state on host", "half the state on host", "state on disk", "weights on disk"])
def test_a_resumed_run_ends_with_the_same_bits_wherever_its_state_is(
    spec: ModelSpec, tmp_path: Path, name: str
) -> None:
    """The second half runs under another plan than the first, from what a checkpoint holds."""
    first, second = without_masters(make_plan()), without_masters(make_plan(name))
    whole = run_steps(spec, [(first, 4)], tmp_path)
    assert same(run_steps(spec, [(first, 2), (second, 2)], tmp_path), whole)
    assert same(run_steps(spec, [(second, 2), (first, 2)], tmp_path), whole)


def run_steps(spec: ModelSpec, parts: list[tuple[Plan, int]], scratch: Path) -> dict[str, torch.Tensor]:
    """The weights after each plan ran for so many steps, in a process of its own as it were."""
    from optimizer.models.build import build_model
    from optimizer.runtime.job.apply import apply

    weights, state, done = None, None, 0
    for plan, num_steps in parts:
        workload = TrainingWorkload(sequence_length=24, global_batch_size=4, max_grad_norm=None, num_steps=10, warmup_steps=0)
        model = build_model(spec, dtype=torch.bfloat16, device="cpu", seed=0)
        if weights is not None:
            model.load_state_dict(weights)
        with apply(model, plan, workload=workload, scratch=scratch) as run:
            if state is not None:
                run.import_state(state)
            for step in range(done, done + num_steps):
                torch.manual_seed(step)
                ids = torch.randint(0, 128, (4, 25))
                run.compute_loss(ids[:, :-1], ids[:, 1:]).backward()
                run.step(1e-3)
            state = run.export_state()
        weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        done += num_steps
    return weights


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[key], right[key]) for key in right)
