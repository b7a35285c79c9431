from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step import host_update
from optimizer.runtime.step.host_update import HostState, UpdateFacts
from optimizer.runtime.tiers import homes
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiny import make_workload
from tests.valkey import Valkey

CPU = torch.device("cpu")


def make_named(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(64, 48).to(dtype)),
        "vector": torch.nn.Parameter(torch.randn(50).to(dtype)),
    }


@pytest.fixture
def make_state(tmp_path: Path) -> Iterator[Callable[..., tuple[HostState, Tiers]]]:
    made = []

    def make(named: dict[str, torch.nn.Parameter], place: str, **workload: Any) -> tuple[HostState, Tiers]:
        made.append(Tiers(device=CPU, meter=Meter(device=CPU), scratch=tmp_path))
        return HostState(
            named,
            plan=OptimizerStatePlan(place=place),
            workload=make_workload(**workload),
            tiers=made[-1],
            home_of=lambda name: None,
        ), made[-1]

    yield make
    for tiers in made:
        tiers.close()


def update(
    state: HostState,
    gradients: dict[str, torch.Tensor],
    *,
    learning_rate: float = 0.01,
    factor: torch.Tensor | None = None,
) -> None:
    state.begin(list(gradients))
    facts = UpdateFacts(learning_rate=learning_rate, grad_factor=factor)
    state.run(list(gradients), gradients.__getitem__, facts)


@pytest.mark.parametrize("place", ["host", "disk", "remote"])
@pytest.mark.parametrize("piece_elements", [1 << 20, 64])
def test_it_is_fused_adamw_with_decay_on_matrices_only(
    make_state: Callable[..., tuple[HostState, Tiers]],
    monkeypatch: pytest.MonkeyPatch,
    remote: Valkey,
    place: str,
    piece_elements: int,
) -> None:
    for module in (homes, host_update):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", piece_elements)
    named, expected = make_named(), make_named()
    state, _ = make_state(named, place, weight_decay=0.3)
    workload = make_workload()
    adamw = torch.optim.AdamW(
        [
            {"params": [expected["matrix"]], "weight_decay": 0.3},
            {"params": [expected["vector"]], "weight_decay": 0.0},
        ],
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        fused=True,
    )
    for step in range(3):
        gradients = {name: torch.randn(p.shape) for name, p in named.items()}
        for name, parameter in expected.items():
            parameter.grad = gradients[name] * 0.5
        for group in adamw.param_groups:
            group["lr"] = 0.01 * (step + 1)
        adamw.step()
        update(state, gradients, learning_rate=0.01 * (step + 1), factor=torch.tensor(0.5))
    for name in named:
        assert torch.equal(named[name], expected[name])
        exported: Any = state.export(name)
        assert set(exported) == {"exp_avg", "exp_avg_sq", "step"}
        assert float(exported["step"]) == 3
        assert torch.equal(exported["exp_avg"].load(), adamw.state[expected[name]]["exp_avg"])


def test_a_tensor_without_a_gradient_is_left_alone(make_state: Callable[..., tuple[HostState, Tiers]]) -> None:
    named = make_named()
    state, _ = make_state(named, "host")
    before = named["vector"].detach().clone()
    update(state, {"matrix": torch.ones(64, 48)})
    assert torch.equal(named["vector"], before)
    assert float(state.export("vector")["step"]) == 0


@pytest.mark.parametrize(
    ("place", "dtype", "host_bytes", "disk_bytes"),
    [
        ("host", torch.float32, 12, 0),
        # Two slots of staging for three parts, of the largest tensor.
        ("disk", torch.float32, 0, 12),
        ("host", torch.bfloat16, 12, 0),
    ],
)
def test_it_takes_the_bytes_that_it_reports(
    make_state: Callable[..., tuple[HostState, Tiers]], place: str, dtype: torch.dtype, host_bytes: int, disk_bytes: int
) -> None:
    named = make_named(dtype)
    state, tiers = make_state(named, place)
    num_elements = sum(p.numel() for p in named.values())
    largest = named["matrix"].numel()
    staging_bytes = 2 * 3 * 4 * largest if place == "disk" else 0
    if dtype != torch.float32:
        staging_bytes += 4 * largest + 2 * 2 * largest
    through_slabs = tiers.meter.bytes_by_category(tier="host")["temporaries"]
    taken_bytes = host_bytes * num_elements + 4 * len(named) + staging_bytes
    assert tiers.meter.host_bytes - through_slabs == taken_bytes
    assert tiers.disk_bytes == disk_bytes * num_elements
    gradients = {name: torch.ones(p.shape, dtype=dtype) for name, p in named.items()}
    before_bytes = tiers.meter.host_bytes
    with tiers.meter:
        update(state, gradients)
    assert tiers.meter.peak().host_bytes == before_bytes
    assert tiers.meter.peak().device_bytes == 0


def test_waiting_for_a_tensor_raises_the_error_of_its_update(
    make_state: Callable[..., tuple[HostState, Tiers]]
) -> None:
    named = make_named()
    state, tiers = make_state(named, "disk")
    tiers.close()
    gradients = {name: torch.ones(p.shape) for name, p in named.items()}
    with pytest.raises((RuntimeError, OSError, ValueError)) as caught:
        update(state, gradients)
    with pytest.raises(type(caught.value)):
        state.wait("vector")
