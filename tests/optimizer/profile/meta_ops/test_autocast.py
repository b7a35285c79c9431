"""Ops on tensors without data cast what autocast casts on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.meta_ops.autocast import FP32, LOWER, WIDEST, autocast_on_meta
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.profile.trace.trace import profile_model
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.profile.conftest import LLAMA
from tests.optimizer.profile.trace.test_trace import compare_peaks, machine  # noqa: F401

_OTHER_NAMES = {"cross_entropy": "cross_entropy_loss"}


@pytest.mark.parametrize("name", [*LOWER, *FP32, *WIDEST])
def test_torch_has_each_name_on_its_list(name: str) -> None:
    op = f"aten::{_OTHER_NAMES.get(name, name)}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "AutocastCPU")


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda wide, low: wide @ low,
        lambda wide, low: torch.nn.functional.linear(low, wide),
        lambda wide, low: torch.addmm(wide[0], low, wide),
        lambda wide, low: torch.einsum("ij,jk->ik", wide, low),
        lambda wide, low: torch.cat((wide, low)),
        lambda wide, low: torch.stack((low, low)),
        lambda wide, low: torch.nn.functional.cross_entropy(low, torch.zeros(4, dtype=torch.long, device=low.device)),
        lambda wide, low: torch.nn.functional.softmax(low, dim=0),
        lambda wide, low: wide + low,
    ],
    ids=["matmul", "linear", "addmm", "einsum", "cat", "stack", "cross_entropy", "softmax", "add"],
)
def test_dtypes_are_those_of_the_cpu(function: Callable[..., Any], autocast: torch.dtype) -> None:
    dtypes = []
    for device in ("cpu", "meta"):
        wide = torch.ones(4, 4, device=device)
        low = torch.ones(4, 4, device=device, dtype=autocast)
        with autocast_on_meta(), torch.autocast("cpu", dtype=autocast, cache_enabled=False):
            dtypes.append(function(wide, low).dtype)
    assert dtypes[0] == dtypes[1]


def test_without_autocast_nothing_is_cast() -> None:
    with autocast_on_meta():
        assert (torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")).dtype == torch.float32


@pytest.mark.breadth
@pytest.mark.parametrize(
    "weights", [WeightsPlan(autocast="bf16"), WeightsPlan(autocast="fp16"), WeightsPlan(dtype="fp16")], ids=str
)
@pytest.mark.parametrize("choice", BLOCK_CHOICES)
def test_the_peak_is_what_the_meter_counts_and_fp16_has_the_sizes_of_bf16(
    profile: Profile,
    machine: Machine,  # noqa: F811
    weights: WeightsPlan,
    choice: str,
) -> None:
    compare_peaks(profile, machine, LLAMA, (choice,) * 2, weights=weights)
    compare_peaks(profile, machine, LLAMA, (choice, "recompute"), weights=weights, accumulation_steps=2)


def test_a_layer_norm_of_narrow_numbers_with_wide_parameters_keeps_wide_statistics(machine: Machine) -> None:  # noqa: F811
    """BERT has such norms, which autocast leaves alone; FakeTensorMode says otherwise."""
    config, weights = SMALL_CONFIGS["bert"], WeightsPlan(autocast="bf16")
    extent = Extent(representations=("fp32+bf16",), choices=("keep",))
    profile = profile_model(read_model_spec(config), extent=extent)
    compare_peaks(profile, machine, config, ("keep",) * profile.num_blocks, weights=weights)
