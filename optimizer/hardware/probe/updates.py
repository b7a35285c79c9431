"""Rates of updates: AdamW as the optimizer runs it, on the device and on the host."""

import importlib.util
from typing import Any

import torch

from optimizer.hardware.probe.clock import quartile_s, random_tensor

_OPTIMIZER_ELEMENTS = {"cpu": 4 * 1024 * 1024, "cuda": 64 * 1024 * 1024}
_CPU = torch.device("cpu")


def probe_updates(device: torch.device, *, max_s: float) -> dict[str, float]:
    num_elements = _OPTIMIZER_ELEMENTS[device.type]
    adamw = _make_adamw(num_elements, device)
    parameter = adamw.param_groups[0]["params"][0]
    optimizers: dict[str, Any] = {"adamw_32": adamw}
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes

        adamw_8bit: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]
        optimizers["adamw_8"] = adamw_8bit([parameter], lr=1e-6)
    return {
        kind: num_elements / quartile_s(optimizer.step, device, max_s=max_s / len(optimizers))
        for kind, optimizer in optimizers.items()
    }


def probe_host_update(on_device: dict[str, float], device: torch.device, *, max_s: float) -> float:
    """Of 32-bit AdamW; the CPU device's own is the host's."""
    if device.type == "cpu":
        return on_device["adamw_32"]
    num_elements = _OPTIMIZER_ELEMENTS["cpu"]
    optimizer = _make_adamw(num_elements, _CPU)
    return num_elements / quartile_s(optimizer.step, _CPU, max_s=max_s)


def _make_adamw(num_elements: int, device: torch.device) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(random_tensor((num_elements // 1024, 1024), device, torch.float32))
    parameter.grad = random_tensor((num_elements // 1024, 1024), device, torch.float32)
    return torch.optim.AdamW([parameter], lr=1e-6, fused=True)
