"""Lion has the bits of its definition, Adafactor those of torch's, both after a resume too."""

from typing import Any

import pytest
import torch

from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.runtime.step.optimizer_state import Optimizer
from tests.optimizer.runtime.tiny import make_workload


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(50, 48), torch.nn.LayerNorm(48), torch.nn.Conv2d(4, 6, 3))


def fill_gradients(model: torch.nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def step_lion(
    model: torch.nn.Module,
    moments: dict[str, torch.Tensor],
    *,
    learning_rate: float,
    decay: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
) -> None:
    """Plainly, as the paper has it."""
    for name, parameter in model.named_parameters():
        moment, gradient = moments.setdefault(name, torch.zeros_like(parameter)), parameter.grad
        mixed = torch.lerp(gradient, moment, beta1)
        weight = parameter.data * (1 - learning_rate * (decay if parameter.dim() >= 2 else 0.0))
        parameter.data = weight - learning_rate * torch.sign(mixed)
        moments[name] = torch.lerp(moment, gradient, 1 - beta2)


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(ours, theirs) for ours, theirs in zip(left.parameters(), right.parameters(), strict=True))


def test_lion_has_the_bits_of_its_definition() -> None:
    model, reference = make_model(), make_model()
    moments: dict[Any, Any] = {}
    workload = make_workload(optimizer="lion", weight_decay=0.3)
    optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
    for seed in range(4):
        fill_gradients(model, seed=seed)
        fill_gradients(reference, seed=seed)
        optimizer.step(0.01 * (seed + 1))
        step_lion(reference, moments, learning_rate=0.01 * (seed + 1), decay=0.3, beta2=workload.beta2)
    assert same(model, reference)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_adafactor_has_the_bits_of_torchs(one_by_one: bool) -> None:
    model, reference = make_model(), make_model()
    optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=make_workload(optimizer="adafactor", weight_decay=0.3))
    groups = [
        {"params": [p for p in reference.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    torchs = torch.optim.Adafactor(groups, foreach=False)
    for seed in range(4):
        fill_gradients(model, seed=seed)
        fill_gradients(reference, seed=seed)
        for group in torchs.param_groups:
            group["lr"] = 0.01 * (seed + 1)
        torchs.step()
        optimizer.learning_rate = 0.01 * (seed + 1)
        if one_by_one:
            for name, _ in model.named_parameters():
                optimizer.step_one(name)
        else:
            optimizer.step(0.01 * (seed + 1))
    assert same(model, reference)


@pytest.mark.parametrize("name", ["lion", "adafactor"])
def test_a_resumed_run_goes_on_with_the_same_bits(name: str) -> None:
    workload = make_workload(optimizer=name)
    whole, model = make_model(), make_model()
    straight, first = (Optimizer(m, plan=OptimizerStatePlan(), workload=workload) for m in (whole, model))
    for seed in range(2):
        fill_gradients(whole, seed=seed)
        fill_gradients(model, seed=seed)
        straight.step(0.01)
        first.step(0.01)
    exported: Any = first.export_state()
    tensors, scalars = exported
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    second = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
    second.import_state(kept, scalars)
    for seed in range(2, 4):
        fill_gradients(whole, seed=seed)
        fill_gradients(model, seed=seed)
        straight.step(0.01)
        second.step(0.01)
    assert same(whole, model)
