"""Layers of stacked experts (Mixtral) beside which adapters are trained, or whose weights are packed.

Their products take all experts of a layer at once, so there is no single product to replace: the whole layer is run again in
backward, from its inputs. That is done for adapted experts too, packed or not, since autograd would otherwise save a second
copy of all experts. Results and gradients are those of peft's ``ParamWrapper``, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optimizer.models.adapters import ADAPTER_NAME, expert_factors, holds_experts
from optimizer.plan.weights import FrozenFormat
from optimizer.runtime.layers.quantize import PackedForm, pack_parameter, unpack


def has_stacked_experts(module: nn.Module) -> bool:
    """The module itself, or peft's wrappers around it."""
    layer = _unwrapped(module)
    return holds_experts(layer) and any(parameter.dim() == 3 for parameter in layer.parameters(recurse=False))


def take_over_experts(outer: nn.Module, form: FrozenFormat, *, device: torch.device | None) -> None:
    """Have the layer run as this module says, its weights packed unless ``form`` is ``same``; nothing for plain experts.

    outer: the layer, or the outermost of peft's wrappers around it.
    """
    adapters: dict[str, nn.Module] = {}
    layer = outer
    while hasattr(layer, "parameter_name"):
        adapters[str(layer.parameter_name)] = layer
        layer = layer.base_layer  # type: ignore[assignment]
    if form == "same" and not adapters:
        return
    experts = _Experts(layer, adapters)
    forms: dict[str, PackedForm] = {}
    for name, parameter in list(layer.named_parameters(recurse=False)):
        packed_form = None
        if form != "same" and parameter.dim() == 3:
            packed, scales, packed_form = pack_parameter(parameter, form, input_dim=-1, device=device)
            forms[name] = packed_form
            del layer._parameters[name]
            layer.register_parameter(f"{name}_packed", packed)
            layer.register_parameter(f"{name}_scales", scales)
        adapter: Any = adapters.get(name)
        scaling = None if adapter is None else float(adapter.scaling[ADAPTER_NAME])
        experts.stacks.append(_Stack(name=name, form=packed_form, scaling=scaling))
    layer.packed_forms = forms  # type: ignore[assignment]
    # On the instance, like the wrapping of blocks: the class's own forward is what ``_Experts`` runs.
    outer.forward = experts.__call__


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """One parameter that holds all experts of a layer: how it is held, and its adapter."""

    name: str
    form: PackedForm | None
    scaling: float | None

    @property
    def num_tensors(self) -> int:
        return (1 if self.form is None else 2) + (0 if self.scaling is None else 2)


class _Experts:
    """Runs a layer of experts from tensors it is given, so that autograd saves its inputs and nothing else."""

    def __init__(self, layer: nn.Module, adapters: dict[str, nn.Module]) -> None:
        self.layer = layer
        self.adapters = adapters
        self.stacks: list[_Stack] = []

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _RunAgain.apply(self.run, len(inputs), *inputs, *self._tensors())  # type: ignore[no-untyped-call]
        return result

    def run(self, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._weights_set(dict(self._make_weights(tensors))):
            result: torch.Tensor = type(self.layer).forward(self.layer, *inputs)
        return result

    def _tensors(self) -> Iterator[torch.Tensor]:
        for stack in self.stacks:
            names = (stack.name,) if stack.form is None else (f"{stack.name}_packed", f"{stack.name}_scales")
            yield from (self.layer.get_parameter(name) for name in names)
            if stack.scaling is not None:
                adapter: Any = self.adapters[stack.name]
                yield adapter.lora_A[ADAPTER_NAME].weight
                yield adapter.lora_B[ADAPTER_NAME].weight

    def _make_weights(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        start = 0
        for stack in self.stacks:
            given = tensors[start : start + stack.num_tensors]
            start += stack.num_tensors
            weight = given[0] if stack.form is None else unpack(given[0], given[1], stack.form)
            if stack.scaling is not None and not self._is_off(stack):
                low, high = expert_factors(given[-2], given[-1], num_experts=weight.shape[0])
                # As peft does: a weight does not change its dtype for autocast.
                with torch.autocast(weight.device.type, enabled=False):
                    weight = torch.baddbmm(weight, high, low, alpha=stack.scaling)
            yield stack.name, weight

    def _is_off(self, stack: _Stack) -> bool:
        """True while the layer runs as if it had no adapter: as its own reference."""
        adapter: Any = self.adapters[stack.name]
        return bool(adapter.disable_adapters)

    @contextmanager
    def _weights_set(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        held: Any = self.layer._parameters
        before = dict(held)
        held.update(weights)
        try:
            yield
        finally:
            held.clear()
            held.update(before)


class _RunAgain(torch.autograd.Function):
    """Saves the inputs of a function and runs it again in backward, with the autocast it had."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], num_inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        kind = tensors[0].device.type
        ctx.run, ctx.num_inputs = run, num_inputs
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.save_for_backward(*tensors)
        return run(tensors[:num_inputs], tensors[num_inputs:])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors = [
            tensor.detach().requires_grad_(needs) if needs else tensor
            for tensor, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            result = ctx.run(tensors[: ctx.num_inputs], tensors[ctx.num_inputs :])
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
        gradients = iter(torch.autograd.grad(result, wanted, gradient))
        return None, None, *(next(gradients) if needs else None for needs in needed)


def _unwrapped(module: nn.Module) -> nn.Module:
    while hasattr(module, "parameter_name"):
        module = module.base_layer  # type: ignore[assignment]
    return module
