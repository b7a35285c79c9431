"""Training through padded batches peaks where it was predicted to, with the bytes predicted, counted by the meter."""

import random
from typing import Any

import pytest
import torch

from optimizer.base.errors import InvalidPlan
from optimizer.data.batches import IGNORED_LABEL
from optimizer.data.lengths import Lengths, Padding, epoch_order, list_batches
from optimizer.estimate.padded import PaddedPrediction, estimate_padded
from optimizer.hardware.machine import Machine
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.runtime.meter.meter import Meter, Peak
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import TrainingWorkload
from tests.optimizer.profiles import trace
from tests.optimizer.techniques.plans import LLAMA, NUM_BLOCKS

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_model_spec(LLAMA)


@pytest.fixture(scope="module")
def profiles(spec: ModelSpec) -> tuple[Profile, Profile]:
    extent = Extent(representations=("fp32", "bf16"))
    return trace(spec, extent=extent), trace(spec, is_padded=True, extent=extent)


def draw_lengths(num: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(100, max(8, round(rng.lognormvariate(3, 0.6)))) for _ in range(num)]


def make_plan(choice: str = "keep", *, size: int = 3, accumulation: int = 1, dtype: str = "fp32") -> Plan:
    return Plan(
        batch=BatchPlan(micro_batch_size=size, accumulation_steps=accumulation),
        weights=WeightsPlan(dtype=dtype),
        activations=ActivationsPlan(per_block=(choice,) * NUM_BLOCKS),
    )


def make_micro_batch(chosen: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(chosen), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED_LABEL)
    mask = torch.zeros_like(ids)
    for row, num_tokens in enumerate(chosen):
        ids[row, :num_tokens] = torch.arange(num_tokens) % 128
        labels[row, : num_tokens - 1] = ids[row, 1:num_tokens]
        mask[row, :num_tokens] = 1
    return ids, labels, mask


def measure_steps(
    spec: ModelSpec, plan: Plan, workload: TrainingWorkload, values: list[int], pad_to_multiple: int
) -> list[Peak]:
    """The device's peak of each step of a run over the dataset in its seeded order."""
    padding = Padding(
        micro_batch_size=plan.batch.micro_batch_size,
        accumulation_steps=plan.batch.accumulation_steps,
        pad_to_multiple=pad_to_multiple,
        seed=workload.seed,
    )
    lengths = Lengths(values)
    batches = list_batches(lengths, padding=padding, num_steps=workload.num_steps)
    meter = Meter(device=CPU)
    model = build_model(spec, dtype=torch_dtype(plan.weights), seed=1)
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
    epoch = 0
    peaks: list[Any] = []
    order: list[Any] = []
    for step in range(workload.num_steps):
        if not order:
            order, epoch = epoch_order(lengths, seed=workload.seed, epoch=epoch).tolist(), epoch + 1
        micro_batches = []
        for index in range(len(batches)):
            if batches[index].step == step:
                size = batches[index].num_sequences
                chosen, order = [values[each] for each in order[:size]], order[size:]
                micro_batches.append(make_micro_batch(chosen, batches[index].length))
        trainer.step(micro_batches, learning_rate=1e-3)
        del micro_batches
        peaks.append(meter.peak())
    trainer.close()
    return peaks


def run_both(
    spec: ModelSpec,
    profiles: tuple[Profile, Profile],
    machine: Machine,
    plan: Plan,
    values: list[int],
    *,
    pad_to_multiple: int = 1,
    **workload: Any,
) -> tuple[PaddedPrediction, list[Peak]]:
    given = {"sequence_length": 128, "global_batch_size": plan.batch.global_batch_size, "num_steps": 12, **workload}
    asked = TrainingWorkload(**given)
    predicted = estimate_padded(
        profiles[0],
        padded_profile=profiles[1],
        plan=plan,
        workload=asked,
        machine=machine,
        lengths=Lengths(values),
        pad_to_multiple=pad_to_multiple,
    )
    return predicted, measure_steps(spec, plan, asked, values, pad_to_multiple)


def check(predicted: PaddedPrediction, peaks: list[Peak]) -> None:
    measured = [peak.device_bytes for peak in peaks]
    assert predicted.device_peak_bytes == max(measured)
    step = predicted.worst_batch.step
    assert measured.index(max(measured)) == step
    assert predicted.peak.device_bytes_by_category == peaks[step].device_bytes_by_category
    assert predicted.peak.moment == peaks[step].moment


@pytest.mark.breadth
@pytest.mark.parametrize("choice", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("pad_to_multiple", [1, 16])
def test_a_run_peaks_in_the_step_and_at_the_bytes_predicted(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine, choice: str, pad_to_multiple: int
) -> None:
    plan = make_plan(choice)
    predicted, peaks = run_both(spec, profiles, machine, plan, draw_lengths(20, seed=2), pad_to_multiple=pad_to_multiple)
    assert predicted.worst_batch.is_padded
    check(predicted, peaks)


def test_in_bf16_too(spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine) -> None:
    check(*run_both(spec, profiles, machine, make_plan(dtype="bf16"), draw_lengths(20, seed=4)))


def test_where_all_are_equally_long_no_mask_is_made(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine
) -> None:
    predicted, peaks = run_both(spec, profiles, machine, make_plan(), [24] * 9)
    assert not predicted.worst_batch.is_padded
    assert predicted.worst_batch.step == 1, "the first step has no optimizer state yet"
    assert predicted.padding_share == 0
    check(predicted, peaks)


def test_a_smaller_last_batch_may_be_the_worst(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine
) -> None:
    """Two sequences of 8 and one, alone in the last batch of an epoch, of 100."""
    values = [8] * 13
    last = int(epoch_order(Lengths(values), seed=0, epoch=0)[-1])
    values[last] = 100
    predicted, peaks = run_both(spec, profiles, machine, make_plan(size=2), values, num_steps=7)
    assert (predicted.worst_batch.num_sequences, predicted.worst_batch.length) == (1, 100)
    check(predicted, peaks)


def test_with_several_micro_batches_a_step_the_prediction_is_a_bound(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine
) -> None:
    plan = make_plan(size=2, accumulation=3)
    predicted, peaks = run_both(spec, profiles, machine, plan, draw_lengths(24, seed=6))
    assert max(peak.device_bytes for peak in peaks) <= predicted.device_peak_bytes


def test_the_mean_batch_is_faster_than_the_worst(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine
) -> None:
    predicted, _ = run_both(spec, profiles, machine, make_plan(), draw_lengths(20, seed=2), num_steps=7)
    assert predicted.mean.step_ms < predicted.worst.step_ms
    assert predicted.median_length <= predicted.p90_length <= predicted.p99_length <= predicted.worst_batch.length
    assert predicted.verdict(predicted.device_peak_high_bytes) == "fits"
    assert predicted.verdict(predicted.device_peak_bytes) == "tight"
    assert predicted.verdict(predicted.device_peak_bytes - 1) == "does_not_fit"


def test_profiles_in_the_wrong_places_are_refused(
    spec: ModelSpec, profiles: tuple[Profile, Profile], machine: Machine
) -> None:
    with pytest.raises(InvalidPlan, match="padded_profile must be of padded batches"):
        run_both(spec, profiles[::-1], machine, make_plan(), [9, 9, 9])
