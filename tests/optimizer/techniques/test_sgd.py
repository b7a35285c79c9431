"""SGD under every technique alone: the bits of plain training, and the predicted bytes on each tier and link."""

import dataclasses
from collections.abc import Callable

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.estimate.training import estimate_training
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import StepMeasurement
from optimizer.workload import TrainingWorkload
from tests.optimizer.techniques.checks import check_bytes
from tests.optimizer.techniques.plans import NUM_BLOCKS, TECHNIQUES, make_plan

MACHINE = make_cpu_machine()
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])


def make_workload(plan: Plan, momentum: float) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=24,
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
        optimizer="sgd",
        momentum=momentum,
    )


@pytest.mark.breadth
@MOMENTA
@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_gives_plain_trainings_bits_and_the_predicted_bytes(
    profile: Profile, measure: Callable[..., StepMeasurement], name: str, momentum: float
) -> None:
    plan = make_plan(name)
    workload = make_workload(plan, momentum)
    plain = dataclasses.replace(make_plan(), batch=plan.batch, logits_and_loss=plan.logits_and_loss)
    measured = measure(plan, workload)
    assert measured.weights_sha256 == measure(plain, workload).weights_sha256
    check_bytes(profile, plan, workload, measured, machine=MACHINE)


@pytest.mark.breadth
@MOMENTA
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["recompute", "gradients on host", "half the state on host", "weights on disk"])
def test_below_fp32_bytes_are_those_predicted(
    profile: Profile, measure: Callable[..., StepMeasurement], name: str, dtype: str, momentum: float
) -> None:
    plan = make_plan(name)
    plan = dataclasses.replace(plan, weights=dataclasses.replace(plan.weights, dtype=dtype))
    workload = make_workload(plan, momentum)
    check_bytes(profile, plan, workload, measure(plan, workload), machine=MACHINE)


def test_plain_sgd_on_fp32_has_no_state(profile: Profile, measure: Callable[..., StepMeasurement]) -> None:
    plan = make_plan()
    predicted = estimate_training(profile, plan=plan, workload=make_workload(plan, 0.0), machine=MACHINE)
    assert predicted.device_bytes_by_category["optimizer_state"] == 0
    moments = estimate_training(profile, plan=plan, workload=make_workload(plan, 0.9), machine=MACHINE)
    assert moments.device_bytes_by_category["optimizer_state"] == 4 * profile.num_parameters


def test_what_moves_fewer_bytes_updates_faster(profile: Profile) -> None:
    plan = make_plan()
    adamw = dataclasses.replace(make_workload(plan, 0.9), optimizer="adamw")
    workloads = (make_workload(plan, 0.0), make_workload(plan, 0.9), adamw)
    step_ms = [estimate_training(profile, plan=plan, workload=w, machine=MACHINE).step_ms for w in workloads]
    saved_ms = [adamw_ms - ms for adamw_ms, ms in zip([step_ms[2]] * 2, step_ms, strict=False)]
    adamw_update_ms = profile.num_parameters / MACHINE.rates.optimizer_elements_per_s["adamw_32"] * 1000
    assert saved_ms == pytest.approx([adamw_update_ms * (1 - 12 / 28), adamw_update_ms * (1 - 20 / 28)])


def test_8_bits_are_adamws_alone() -> None:
    plan = dataclasses.replace(make_plan(), optimizer_state=OptimizerStatePlan(bits=8))
    with pytest.raises(InvalidPlan, match=r"bits is 8, which is AdamW's state \(workload.optimizer is sgd"):
        plan.check(num_blocks=NUM_BLOCKS, workload=make_workload(plan, 0.9))


def test_embeddings_with_sparse_gradients_are_refused() -> None:
    plan = dataclasses.replace(make_plan(), weights=WeightsPlan())
    with pytest.raises(InvalidPlan, match=r"workload.optimizer is sgd; .* is updated by AdamW alone"):
        plan.check(num_blocks=NUM_BLOCKS, workload=make_workload(plan, 0.9), has_sparse_gradients=True)


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(InvalidWorkload, match=r"workload.optimizer is 'adam'; allowed: adamw, sgd"):
        TrainingWorkload(optimizer="adam")
