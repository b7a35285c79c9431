"""Rates of updates: AdamW as the runtime runs it, on the device and on the host."""

import importlib.util

import torch

from optimizer.hardware.probe.clock import quartile_s, random_tensor
from optimizer.optimizers import UpdateRate
from optimizer.plan.optimizer_state import MIN_8BIT_ELEMENTS, OptimizerStatePlan
from optimizer.runtime.updates.update_rule import make_optimizer
from optimizer.workload import TrainingWorkload

_OPTIMIZER_ELEMENTS = {"cpu": 4 * 1024 * 1024, "cuda": 64 * 1024 * 1024}
_CPU = torch.device("cpu")
_NUM_SMALL = 16
_WORKLOAD = TrainingWorkload(sequence_length=8, global_batch_size=1, learning_rate=1e-6)


def probe_updates(device: torch.device, *, max_s: float) -> dict[UpdateRate, float]:
    """Elements per second by state kind, of one large tensor."""
    num_elements = _OPTIMIZER_ELEMENTS[device.type]
    kinds: dict[UpdateRate, int] = {"adamw_32": 32, **({"adamw_8": 8} if _has_8bit() else {})}
    return {
        kind: num_elements / _update_s((num_elements,), bits, device, max_s=max_s / len(kinds)) for kind, bits in kinds.items()
    }


def probe_8bit_tensor_s(rates: dict[UpdateRate, float], device: torch.device, *, max_s: float) -> float:
    """Time of each tensor beside its elements where states have 8 bits, whose update is Python; 0 without bitsandbytes."""
    if "adamw_8" not in rates:
        return 0.0
    whole_s = _update_s((MIN_8BIT_ELEMENTS,) * _NUM_SMALL, 8, device, max_s=max_s)
    return max(0.0, whole_s / _NUM_SMALL - MIN_8BIT_ELEMENTS / rates["adamw_8"])


def probe_host_update(on_device: dict[UpdateRate, float], device: torch.device, *, max_s: float) -> float:
    """Rate of 32-bit AdamW; the CPU device's own is the host's."""
    if device.type == "cpu":
        return on_device["adamw_32"]
    num_elements = _OPTIMIZER_ELEMENTS["cpu"]
    return num_elements / _update_s((num_elements,), 32, _CPU, max_s=max_s)


def _has_8bit() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None


def _update_s(sizes: tuple[int, ...], bits: int, device: torch.device, *, max_s: float) -> float:
    """Time to update tensors of so many elements, together."""
    parameters = [torch.nn.Parameter(random_tensor((size // 1024, 1024), device, torch.float32)) for size in sizes]
    for parameter in parameters:
        parameter.grad = 1e-3 * random_tensor(tuple(parameter.shape), device, torch.float32)
    optimizer = make_optimizer(parameters, plan=OptimizerStatePlan(bits=8 if bits == 8 else 32), workload=_WORKLOAD)
    return quartile_s(optimizer.step, device, max_s=max_s)
