"""A trace without data is what the runtime does with data: the peaks priced from it are those that the meter counts."""

from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.common.machines import make_cpu_machine
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload
from tests.optimizer.profile.conftest import LLAMA


@pytest.fixture(scope="module")
def machine() -> Machine:
    return make_cpu_machine()


def compare_peaks(
    profile: Profile,
    machine: Machine,
    config: dict[str, Any],
    per_block: tuple[str, str],
    *,
    weights: WeightsPlan | None = None,
    micro_batch_size: int = 2,
    accumulation_steps: int = 1,
) -> Prediction:
    from optimizer.runtime.job.measure import measure_step

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
def test_the_peak_of_each_choice_is_what_the_meter_counts(
    profile: Profile, machine: Machine, per_block: tuple[str, str], batch: dict[str, Any]
) -> None:
    compare_peaks(profile, machine, LLAMA, per_block, **batch)


@pytest.mark.parametrize("other", [choice for choice in BLOCK_CHOICES if choice != "selective"])
def test_the_peak_of_a_selective_block_beside_another_is_what_the_meter_counts(
    profile: Profile, machine: Machine, other: str
) -> None:
    compare_peaks(profile, machine, LLAMA, ("selective", other))
    compare_peaks(profile, machine, LLAMA, (other, "selective"))


def test_selective_lies_between_keeping_and_recomputing(profile: Profile, machine: Machine) -> None:
    keep, selective, recompute = (
        compare_peaks(profile, machine, LLAMA, (choice,) * 2) for choice in ("keep", "selective", "recompute")
    )
    assert keep.device_peak_bytes > selective.device_peak_bytes > recompute.device_peak_bytes
    assert keep.step_ms < selective.step_ms < recompute.step_ms


class DispatchCounter(Meter):
    """Counts ops by what the runtime is doing."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(
        self,
        func: object,
        types: tuple[type[torch.Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> bool | torch.Tensor | tuple[torch.Tensor, ...]:
        self.counts[self._phase] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("choice", BLOCK_CHOICES)
def test_every_dispatch_of_a_step_is_in_the_profile_views_included(profile: Profile, choice: str) -> None:
    shape = (2, 40)
    model = build_model(read_model_spec(LLAMA))
    meter = DispatchCounter()
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=1), activations=ActivationsPlan(per_block=(choice,) * 2)
    )
    workload = TrainingWorkload(sequence_length=40, global_batch_size=2)
    trainer = Trainer(model, plan=plan, workload=workload, device=torch.device("cpu"), meter=meter)
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    with trainer.metered():
        trainer.accumulate(batches)
        trainer.gradients.clear()
        meter.counts.clear()
        trainer.accumulate(batches)
    trainer.close()
    regime = profile.regime("fp32", shape)
    templates = [regime.templates[choice][index] for index in regime.block_templates]
    expected = {
        "forward": [regime.parts["prologue"], *(template.forward for template in templates)],
        "head and loss": [regime.parts["head"]],
        "backward of head and loss": [regime.parts["head_backward_first"]],
        "backward": [regime.parts["norm_backward_first"], *(template.backward_first for template in templates)],
    }
    for phase, indices in expected.items():
        parts = [profile.parts[index] for index in indices]
        # The micro-batch is on the device already: its copy there is one op less, or one more view.
        assert abs(sum(len(part.ops) + part.num_views for part in parts) - meter.counts[phase]) <= 1
