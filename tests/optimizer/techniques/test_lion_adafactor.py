"""Lion and Adafactor under every technique alone: the bits of plain training, and the predicted bytes on each tier and link."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.common.machines import make_cpu_machine
from optimizer.base.errors import InvalidPlan
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
ON_DEVICE = tuple(name for name in TECHNIQUES if "state" not in name and "weights" not in name)
CASES = [*(("lion", name) for name in TECHNIQUES), *(("adafactor", name) for name in ON_DEVICE)]
BELOW_FP32: dict[str, Any] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "bf16 without masters": {"dtype": "bf16", "master": "none"},
}


def make_workload(plan: Plan, optimizer: str) -> TrainingWorkload:
    return TrainingWorkload(
        sequence_length=24,
        global_batch_size=plan.batch.global_batch_size,
        max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
        optimizer=optimizer,
    )


@pytest.mark.breadth
@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_every_technique_gives_plain_trainings_bits_and_the_predicted_bytes(
    profile: Profile, measure: Callable[..., StepMeasurement], optimizer: str, name: str
) -> None:
    plan = make_plan(name)
    workload = make_workload(plan, optimizer)
    plain = dataclasses.replace(make_plan(), batch=plan.batch, logits_and_loss=plan.logits_and_loss)
    measured = measure(plan, workload)
    assert measured.weights_sha256 == measure(plain, workload).weights_sha256
    check_bytes(profile, plan, workload, measured, machine=MACHINE)


@pytest.mark.breadth
@pytest.mark.parametrize("below", BELOW_FP32)
@pytest.mark.parametrize(
    ("optimizer", "name"), [case for case in CASES if case[1] in ("consume", "gradients on host", "half the state on host")]
)
def test_below_fp32_bytes_are_those_predicted(
    profile: Profile, measure: Callable[..., StepMeasurement], optimizer: str, name: str, below: str
) -> None:
    plan = make_plan(name)
    plan = dataclasses.replace(plan, weights=dataclasses.replace(plan.weights, **BELOW_FP32[below]))
    workload = make_workload(plan, optimizer)
    if plan.find_conflict(workload) is None:
        check_bytes(profile, plan, workload, measure(plan, workload), machine=MACHINE)


def test_state_is_a_number_for_each_weight_or_for_each_row_and_column(profile: Profile) -> None:
    plan = make_plan()
    lion, adafactor = (
        estimate_training(profile, plan=plan, workload=make_workload(plan, optimizer), machine=MACHINE)
        .device_bytes_by_category["optimizer_state"]
        for optimizer in ("lion", "adafactor")
    )
    assert lion == 4 * profile.num_parameters
    sizes = profile.tensors.in_order()
    numbers = sum(size.rows + size.columns + 1 if size.is_matrix else size.num_elements + 1 for size in sizes)
    assert adafactor == 4 * numbers < lion / 10


@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_8_bits_are_adamws_alone(optimizer: str) -> None:
    plan = dataclasses.replace(make_plan(), optimizer_state=OptimizerStatePlan(bits=8))
    with pytest.raises(InvalidPlan, match=rf"bits is 8, which is AdamW's state \(workload.optimizer is {optimizer}"):
        plan.check(num_blocks=NUM_BLOCKS, workload=make_workload(plan, optimizer))


@pytest.mark.parametrize("name", ["state on host", "state on disk", "weights on host"])
def test_adafactors_state_stays_on_the_device(name: str) -> None:
    plan = make_plan(name)
    with pytest.raises(InvalidPlan, match="Adafactor's state cannot have: its update needs whole tensors, on the device"):
        plan.check(num_blocks=NUM_BLOCKS, workload=make_workload(plan, "adafactor"))


@pytest.mark.parametrize("optimizer", ["lion", "adafactor"])
def test_embeddings_with_sparse_gradients_are_refused(optimizer: str) -> None:
    plan = dataclasses.replace(make_plan(), weights=WeightsPlan())
    with pytest.raises(InvalidPlan, match=rf"workload.optimizer is {optimizer}; .* is updated by AdamW alone"):
        plan.check(num_blocks=NUM_BLOCKS, workload=make_workload(plan, optimizer), has_sparse_gradients=True)


def test_an_update_is_priced_by_what_it_moves(profile: Profile) -> None:
    plan = make_plan()
    adamw, lion, adafactor = (
        estimate_training(profile, plan=plan, workload=make_workload(plan, optimizer), machine=MACHINE).step_ms
        for optimizer in ("adamw", "lion", "adafactor")
    )
    update_ms = profile.num_parameters / MACHINE.rates.optimizer_elements_per_s["adamw_32"] * 1000
    assert [lion - adamw, adafactor - adamw] == pytest.approx([update_ms * (52 / 28 - 1), update_ms * (76 / 28 - 1)])
