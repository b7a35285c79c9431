"""Carries out the gradients row of a plan, and clips: what becomes of ``param.grad`` between backward and the update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False, kw_only=True)
class Clipped:
    """What clipping found, and what it left to do."""

    norm: torch.Tensor
    """Global norm before clipping, of the gradients without their loss scale; a scalar in fp32."""
    factor: torch.Tensor | None
    """What the update must still multiply gradients by, in fp32; None where that is done."""


class Gradients:
    """The gradients of one model's trained parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def clip_(self, max_norm: float | None, *, loss_scale: float = 1.0) -> Clipped:
        """Scale all gradients in place so that their global norm is at most ``max_norm`` and their loss scale gone.

        Exact, and without a second copy of any gradient: norms are one fp32 number per tensor, the scaling is one pass in place.
        fp16 gradients are left as they are, since small ones would vanish; the update gets the factor.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            return Clipped(norm=torch.zeros(()), factor=None)
        # In fp32, since the norm of scaled gradients is beyond fp16, and bf16 would keep two digits of it.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # type: ignore[call-overload]
        norm = torch.linalg.vector_norm(torch.stack(norms)) / loss_scale
        factor = None
        if max_norm is not None:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0) / loss_scale
        elif loss_scale != 1.0:
            factor = torch.full_like(norm, 1 / loss_scale)
        if factor is None or any(gradient.dtype == torch.float16 for gradient in gradients):
            return Clipped(norm=norm, factor=factor)
        torch._foreach_mul_(gradients, factor)
        return Clipped(norm=norm, factor=None)
