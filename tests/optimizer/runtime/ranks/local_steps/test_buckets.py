"""Differences that cross in several buckets are those that cross in one."""

from typing import Any

import pytest
import torch
from torch import nn

from optimizer.formats import outer_step as formats
from optimizer.formats.outer_step import count_host_bytes, list_buckets
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, SyncFormat, SyncRule
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.ranks.outer_step import OuterStep
from optimizer.runtime.tiers.tiers import Tiers

CPU = torch.device("cpu")
SIZES = ((7, 100), (300,), (20, 20))


class _Both:
    """Two ranks that have made the same steps: each sum is twice what one gives."""

    rank, num_ranks = 0, 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def all_reduce_on_host_(self, tensor: torch.Tensor, *, largest: bool = False, num_steps: int = 1) -> None:
        self.sent.append(tensor.numel())
        if not largest:
            tensor.mul_(2)


def bring_together(
    sync_format: SyncFormat, *, dtype: torch.dtype = torch.float32, sync_rule: SyncRule = "nesterov"
) -> tuple[torch.Tensor, _Both, int]:
    """Weights after two synchronizations, what crossed, and bytes on the host."""
    torch.manual_seed(1)
    named = {f"weight {index}": nn.Parameter(torch.randn(shape).to(dtype)) for index, shape in enumerate(SIZES)}
    plan = Plan(
        layout=DeviceLayout(num_devices=2, sync_every=2, sync_format=sync_format, sync_rule=sync_rule),
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        weights=WeightsPlan() if dtype == torch.float32 else WeightsPlan(dtype="bf16", master="none"),
        activations=ActivationsPlan(per_block=("keep",)),
    )

    def write(values: Any) -> None:
        for name, value in values.items():
            named[name].data.copy_(value)

    with Meter(device=CPU) as meter:
        ranks: Any = _Both()
        outer = OuterStep(
            named, plan=plan, ranks=ranks, tiers=Tiers(device=CPU, meter=meter), read=lambda: dict(named), write=write
        )
        host_bytes = meter.bytes_by_category(tier="host")["optimizer_state"]
        for _ in range(2):
            for parameter in named.values():
                parameter.data.add_(torch.randn(parameter.shape).to(dtype), alpha=0.1)
            outer.synchronize()
    return torch.cat([parameter.detach().reshape(-1) for parameter in named.values()]), ranks, host_bytes


@pytest.mark.parametrize("sync_format", ["fp32", "bf16", "int8"])
def test_a_model_of_several_buckets_gets_the_weights_of_one(monkeypatch: pytest.MonkeyPatch, sync_format: SyncFormat) -> None:
    whole, once, _ = bring_together(sync_format)
    # Blocks of scales end where buckets do.
    monkeypatch.setattr(formats, "BUCKET_ELEMENTS", 512)
    cut, often, _ = bring_together(sync_format)
    assert torch.equal(whole, cut)
    assert sum(often.sent) == sum(once.sent)
    assert len(often.sent) == 3 * len(once.sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sync_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("bucket_elements", "sync_rule"), [(512, "nesterov"), (1 << 24, "average")])
def test_bytes_on_the_host_are_those_that_are_counted(
    monkeypatch: pytest.MonkeyPatch, sync_format: SyncFormat, dtype: torch.dtype, bucket_elements: int, sync_rule: SyncRule
) -> None:
    monkeypatch.setattr(formats, "BUCKET_ELEMENTS", bucket_elements)
    weights, _, host_bytes = bring_together(sync_format, dtype=dtype, sync_rule=sync_rule)
    assert host_bytes == count_host_bytes(
        len(weights),
        sync_format=sync_format,
        sync_rule=sync_rule,
        weight_bytes=dtype.itemsize,
        are_rounded=dtype != torch.float32,
    )
    assert sum(map(len, list_buckets(len(weights)))) == len(weights)
