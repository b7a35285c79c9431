"""Samples packed into a row give the losses and gradients that each gives alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common.machines import make_cpu_machine
from optimizer.data.batches import IGNORED_LABEL
from optimizer.estimate.training import estimate_training
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.packing import PACKING_TYPES
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import measure_step
from optimizer.runtime.step.micro_batch import shares_of_labels
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

LENGTHS = (11, 5, 9)
ROW = 32


def _samples() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, 60, (length,), generator=draw) for length in LENGTHS]


def _pack(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row: every sample but its last token, then padding."""
    ids = torch.zeros(1, ROW, dtype=torch.long)
    labels = torch.full((1, ROW), IGNORED_LABEL)
    positions = torch.zeros(1, ROW, dtype=torch.long)
    at = 0
    for sample in samples:
        end = at + len(sample) - 1
        ids[0, at:end], labels[0, at:end], positions[0, at:end] = sample[:-1], sample[1:], torch.arange(end - at)
        at = end
    positions[0, at:] = torch.arange(ROW - at)
    return ids, labels, positions


def _model(name: str, **changes: Any) -> nn.Module:
    return build_model(read_model_spec({**SMALL_CONFIGS[name], **changes}), seed=1)


def _trainer(model: nn.Module) -> Trainer:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=("keep",) * len(find_blocks(model))),
    )
    workload = TrainingWorkload(sequence_length=ROW, global_batch_size=1, packing="best_fit")
    return Trainer(model, plan=plan, workload=workload, device=torch.device("cpu"), meter=None)


def _loss_alone(model: nn.Module, sample: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=sample[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits, sample[1:], reduction="sum")


@pytest.mark.parametrize("name", PACKING_TYPES)
def test_a_packed_row_gives_the_loss_and_gradients_of_its_samples_alone(name: str) -> None:
    model, samples = _model(name).eval(), _samples()
    num_labels = sum(len(sample) - 1 for sample in samples)
    expected = sum((_loss_alone(model, sample) for sample in samples), torch.zeros(())) / num_labels
    expected.backward()
    wanted = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    trainer = _trainer(model)
    model.eval()
    loss = trainer.forward.loss_of(_pack(samples))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for key, parameter in model.named_parameters():
        if wanted[key] is not None:
            assert torch.allclose(parameter.grad, wanted[key], atol=2e-5), key


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("choice", ["keep", "recompute", "offload"])
def test_the_predicted_peak_of_packed_rows_is_the_measured_one(name: str, choice: Any) -> None:
    spec = read_model_spec({**SMALL_CONFIGS[name], "sliding_window": 16} if name == "mistral" else SMALL_CONFIGS[name])
    workload = TrainingWorkload(sequence_length=ROW, global_batch_size=4, packing="best_fit")
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
        activations=ActivationsPlan(per_block=(choice,) * spec.num_blocks),
    )
    extent = Extent(representations=(plan.weights.representation,), choices=(choice,), shapes=((2, ROW),))
    profile = profile_model(spec, is_packed=True, extent=extent)
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=make_cpu_machine())
    measured = measure_step(spec, plan=plan, workload=workload, device="cpu")
    assert measured.device_peak_bytes == predicted.device_peak_bytes
    assert measured.host_peak_bytes == predicted.host_peak_bytes


def test_micro_batches_weigh_by_their_labels() -> None:
    few, many = torch.tensor([[1, IGNORED_LABEL]]), torch.tensor([[1, 2], [3, IGNORED_LABEL]])
    assert shares_of_labels([(few, few), (many, many)]) == [0.25, 0.75]
    assert shares_of_labels([(few, few), (few, few)]) == []
