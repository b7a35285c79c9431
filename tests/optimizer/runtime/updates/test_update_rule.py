from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import CheckpointInvalid
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import host_update
from optimizer.runtime.step.host_update import HostState, UpdateFacts
from optimizer.runtime.step.optimizer_state import Optimizer
from optimizer.runtime.tiers import homes
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiny import make_workload

CPU = torch.device("cpu")
MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(50, 48), torch.nn.LayerNorm(48)).to(dtype)


def make_torchs(model: torch.nn.Module, *, momentum: float, weight_decay: float) -> Any:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, momentum=momentum, fused=True)


def fill_gradients(model: torch.nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def step_torchs(optimizer: Any, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


@MOMENTA
def test_on_the_device_it_is_torchs_sgd_with_decay_on_matrices_only(momentum: float) -> None:
    model, reference = make_model(), make_model()
    workload = make_workload(optimizer="sgd", momentum=momentum, weight_decay=0.3)
    optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
    expected = make_torchs(reference, momentum=momentum, weight_decay=0.3)
    for seed in range(3):
        fill_gradients(model, seed=seed)
        fill_gradients(reference, seed=seed)
        optimizer.step(0.01 * (seed + 1))
        step_torchs(expected, 0.01 * (seed + 1))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("piece_elements", [1 << 20, 64])
@MOMENTA
def test_elsewhere_it_has_the_bits_of_torchs_sgd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, piece_elements: int, momentum: float
) -> None:
    for module in (homes, host_update):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", piece_elements)
    model, reference = make_model(), make_model()
    tiers = Tiers(device=CPU, meter=Meter(device=CPU), scratch=tmp_path)
    state = HostState(
        dict(model.named_parameters()),
        plan=OptimizerStatePlan(place=place),
        workload=make_workload(optimizer="sgd", momentum=momentum, weight_decay=0.3),
        tiers=tiers,
        home_of=lambda name: None,
    )
    expected = make_torchs(reference, momentum=momentum, weight_decay=0.3)
    for seed in range(3):
        fill_gradients(model, seed=seed)
        fill_gradients(reference, seed=seed)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        state.begin(list(gradients))
        state.run(list(gradients), gradients.__getitem__, UpdateFacts(learning_rate=0.01, grad_factor=None))
        step_torchs(expected, 0.01)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert set(state.export(name)) == ({"momentum_buffer"} if momentum else set())
        if momentum:
            exported: Any = state.export(name)
            assert torch.equal(exported["momentum_buffer"].load(), expected.state[theirs]["momentum_buffer"])
    tiers.close()


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [(torch.float32, 0), (torch.bfloat16, 4)])
def test_without_momentum_nothing_is_kept_but_the_master_weights(dtype: torch.dtype, bytes_per_element: int) -> None:
    model = make_model(dtype)
    meter = Meter(device=CPU)
    with meter:
        optimizer = Optimizer(
            model, plan=OptimizerStatePlan(), workload=make_workload(optimizer="sgd", momentum=0.0)
        )
        fill_gradients(model, seed=1)
        optimizer.step(0.01)
        optimizer.zero_grad()
    num_elements = sum(p.numel() for p in model.parameters())
    assert meter.device_bytes == bytes_per_element * num_elements
    assert sum(tensor.nbytes for tensor in optimizer.state_tensors()) == bytes_per_element * num_elements


def test_a_tensor_whose_first_gradient_comes_late_is_stepped_like_any_other() -> None:
    model = make_model()
    workload = make_workload(optimizer="sgd", momentum=0.9, weight_decay=0.0)
    optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    before = bias.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step(0.5)
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    optimizer.step(0.5)
    assert torch.equal(bias, before - 0.5)


def test_momentum_from_a_checkpoint_goes_on_to_the_same_bits() -> None:
    workload = make_workload(optimizer="sgd")
    whole, first, second = make_model(), make_model(), make_model()
    for model, seeds in ((whole, range(4)), (first, range(2))):
        optimizer = Optimizer(model, plan=OptimizerStatePlan(), workload=workload)
        for seed in seeds:
            fill_gradients(model, seed=seed)
            optimizer.step(0.01)
    exported: Any = optimizer.export_state()
    tensors, scalars = exported
    assert {key.rpartition("//")[2] for key in tensors} == {"momentum_buffer"}
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, plan=OptimizerStatePlan(), workload=workload)
    resumed.import_state({key: tensor.clone() for key, tensor in tensors.items()}, scalars)
    for seed in (2, 3):
        fill_gradients(second, seed=seed)
        resumed.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(("kept", "asked"), [("exp_avg", "sgd"), ("momentum_buffer", "adamw")])
def test_another_optimizers_state_is_refused(kept: str, asked: str) -> None:
    optimizer = Optimizer(make_model(), plan=OptimizerStatePlan(), workload=make_workload(optimizer=asked))
    with pytest.raises(CheckpointInvalid, match=rf"optimizer state holds '{kept}' of 0.bias, which this optimizer does"):
        optimizer.import_state({f"0.bias//{kept}": torch.zeros(48)}, {})
