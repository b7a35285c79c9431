"""A trace without data is what the runtime does with data: the peaks priced from it are those that the meter counts."""

import pytest

from optimizer.estimate.training import estimate_training
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import BLOCK_CHOICES
from optimizer.workload import TrainingWorkload
from tests.optimizer.machines import make_cpu_machine
from tests.optimizer.profile.conftest import LLAMA


@pytest.fixture(scope="module")
def machine():
    return make_cpu_machine()


def compare_peaks(profile, machine, config, per_block, *, weights=None, micro_batch_size=2, accumulation_steps=1):
    from optimizer.runtime.measure import measure_step

    plan = Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        weights=weights or WeightsPlan(),
        activations=ActivationsPlan(per_block=per_block),
    )
    workload = TrainingWorkload(sequence_length=40, global_batch_size=plan.batch.global_batch_size)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    measured = measure_step(read_model_spec(config), plan=plan, workload=workload)
    assert predicted.device_peak_bytes == measured.device_peak_bytes
    assert predicted.device_bytes_by_category == measured.device_bytes_by_category
    assert predicted.host_peak_bytes == measured.host_peak_bytes
    return predicted


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"micro_batch_size": 1, "accumulation_steps": 2},
        {"weights": WeightsPlan(dtype="bf16"), "accumulation_steps": 3},
    ],
    ids=["fp32", "micro-batch 1", "bf16 accumulated"],
)
@pytest.mark.parametrize("per_block", [(choice,) * 2 for choice in BLOCK_CHOICES], ids=BLOCK_CHOICES)
def test_the_peak_of_each_choice_is_what_the_meter_counts(profile, machine, per_block, batch):
    compare_peaks(profile, machine, LLAMA, per_block, **batch)


@pytest.mark.parametrize("other", [choice for choice in BLOCK_CHOICES if choice != "selective"])
def test_the_peak_of_a_selective_block_beside_another_is_what_the_meter_counts(profile, machine, other):
    compare_peaks(profile, machine, LLAMA, ("selective", other))
    compare_peaks(profile, machine, LLAMA, (other, "selective"))


def test_selective_lies_between_keeping_and_recomputing(profile, machine):
    keep, selective, recompute = (
        compare_peaks(profile, machine, LLAMA, (choice,) * 2) for choice in ("keep", "selective", "recompute")
    )
    assert keep.device_peak_bytes > selective.device_peak_bytes > recompute.device_peak_bytes
    assert keep.step_ms < selective.step_ms < recompute.step_ms
