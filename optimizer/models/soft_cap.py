"""Logits under a soft cap, ``cap * tanh(logits / cap)``, as one node of the graph."""

from typing import Any

import torch

from optimizer.formats.stock_layers import uses_memory_saving_layers


def soften(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Any shape. Saves what tanh returns, and goes back in one pass: the cap cancels there."""
    if not (torch.is_grad_enabled() and logits.requires_grad and uses_memory_saving_layers()):
        return torch.tanh(logits / cap) * cap
    result: torch.Tensor = _Softened.apply(logits, cap)  # type: ignore[no-untyped-call]
    return result


class _Softened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, cap: float) -> torch.Tensor:
        bent = torch.tanh(logits / cap)
        ctx.save_for_backward(bent)
        return bent * cap

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (bent,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, bent), None
