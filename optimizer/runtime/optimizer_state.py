"""Carries out the optimizer-state row of a plan: AdamW with moments in 32 or 8 bits, and fp32 master weights for bf16.

32 bits is torch's fused AdamW, which allocates nothing but its state; 8 bits is bitsandbytes' block-wise AdamW (tensors under
4096 elements stay in 32 bits). With bf16 weights each parameter is stepped by itself, so the fp32 copy of a gradient exists
for one parameter at a time. Also here: the learning rate.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from optimizer.errors import CheckpointInvalid, MissingExtra
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.workload import TrainingWorkload

FINAL_LEARNING_RATE_FRACTION = 0.1
"""Linear and cosine schedules end at this fraction of the peak, at the last step."""

_MASTER = "master"
_CONSTANT_MAPS = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""bitsandbytes' tables of 8-bit values: the same for every parameter, so never written to a checkpoint."""

StateTensors = dict[str, torch.Tensor]
StateScalars = dict[str, int | float]


def learning_rate_at(step: int, workload: TrainingWorkload) -> float:
    """Learning rate of the optimizer step with this index, counted from 0; a pure function."""
    if step < workload.warmup_steps:
        return workload.learning_rate * (step + 1) / workload.warmup_steps
    if workload.schedule == "constant":
        return workload.learning_rate
    num_after_warmup = workload.num_steps - workload.warmup_steps
    progress = min(1.0, (step - workload.warmup_steps) / max(1, num_after_warmup - 1))
    remaining = 1 - progress if workload.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    fraction = FINAL_LEARNING_RATE_FRACTION + (1 - FINAL_LEARNING_RATE_FRACTION) * remaining
    return workload.learning_rate * fraction


class Optimizer:
    """AdamW over a model's parameters, by name, with the state the plan asks for."""

    def __init__(self, model: nn.Module, *, plan: OptimizerStatePlan, workload: TrainingWorkload) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: nn.Parameter(p.detach().to(torch.float32))
            for name, p in self._named.items()
            if p.dtype != torch.float32
        }
        self._stepped = {name: self._masters.get(name, p) for name, p in self._named.items()}
        self._parameter_of: dict[torch.Tensor, nn.Parameter] = {
            stepped: self._named[name] for name, stepped in self._stepped.items()
        }
        self._inner = _make_adamw(_decay_groups(self._stepped.values(), workload.weight_decay), plan, workload)

    def step(self, learning_rate: float, *, grad_factor: torch.Tensor | None = None) -> None:
        """One update from ``param.grad``; gradients stay until ``zero_grad``, except those of bf16 and fp16 parameters.

        grad_factor: what the fp32 copies of gradients are multiplied by; for weights below fp32 only.
        """
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        if not self._masters:
            self._inner.step()
            return
        groups = self._inner.param_groups
        try:
            for group in groups:
                for stepped in group["params"]:
                    # The optimizer sees one parameter at a time: one fp32 gradient exists at a time.
                    self._inner.param_groups = [{**group, "params": [stepped]}]
                    self._step_one(stepped, grad_factor)
        finally:
            self._inner.param_groups = groups

    def zero_grad(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor kept between steps, master weights included."""
        yield from self._masters.values()
        for state in self._inner.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield value

    def export_state(self) -> tuple[StateTensors, StateScalars]:
        """What a checkpoint holds, by ``<parameter>//<what>``. The tensors are the live ones, not copies."""
        tensors: StateTensors = {f"{name}//{_MASTER}": master.detach() for name, master in self._masters.items()}
        scalars: StateScalars = {}
        for name, stepped in self._stepped.items():
            for key, value in self._inner.state.get(stepped, {}).items():
                if key in _CONSTANT_MAPS:
                    continue
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}//{key}"] = value
                else:
                    scalars[f"{name}//{key}"] = value
        return tensors, scalars

    @torch.no_grad()
    def import_state(self, tensors: StateTensors, scalars: StateScalars) -> None:
        """Undo ``export_state``. Raises CheckpointInvalid where names do not match this model."""
        items: list[tuple[str, Any]] = [*tensors.items(), *scalars.items()]
        for full_name, value in items:
            name, _, key = full_name.rpartition("//")
            if name not in self._stepped:
                raise CheckpointInvalid(f"optimizer state names {name!r}, which the model does not have")
            if key == _MASTER:
                self._masters[name].copy_(value)
            else:
                stepped = self._stepped[name]
                # A copy: what was read from a file may be a view of the whole file.
                on_device = value.to(stepped.device, copy=True) if isinstance(value, torch.Tensor) else value
                self._inner.state[stepped][key] = on_device
        for owner, state in self._inner.state.items():
            # bitsandbytes gives its tables only to tensors it keeps in 8 bits.
            if "absmax1" in state:
                for key, map_name in _CONSTANT_MAPS.items():
                    state[key] = self._inner.name2qmap[map_name].to(owner.device)  # type: ignore[attr-defined]

    def _step_one(self, stepped: torch.Tensor, grad_factor: torch.Tensor | None) -> None:
        parameter = self._parameter_of[stepped]
        if parameter.grad is None:
            return
        if stepped is parameter:
            self._inner.step()
            return
        stepped.grad = parameter.grad.to(torch.float32)
        parameter.grad = None
        if grad_factor is not None:
            stepped.grad.mul_(grad_factor)
        self._inner.step()
        stepped.grad = None
        with torch.no_grad():
            parameter.copy_(stepped)


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices and embeddings only: norms and biases are not shrunk."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _make_adamw(
    groups: list[dict[str, Any]], plan: OptimizerStatePlan, workload: TrainingWorkload
) -> torch.optim.Optimizer:
    betas = (workload.beta1, workload.beta2)
    if plan.bits == 32:
        return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon, fused=True)
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingExtra("bitsandbytes", needed_for="optimizer state in 8 bits") from error
    adamw_8bit: Any = bitsandbytes.optim.AdamW8bit  # type: ignore[attr-defined]
    optimizer: torch.optim.Optimizer = adamw_8bit(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon)
    return optimizer
