"""Carries out the gradients row of a plan, and clips: what becomes of ``param.grad`` between backward and the update."""

from collections.abc import Sequence

import torch
from torch import nn


class Gradients:
    """The gradients of one model's trained parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def clip_(self, max_norm: float | None) -> torch.Tensor:
        """Scale all gradients in place so that their global norm is at most ``max_norm``; returns the norm before.

        Exact, and without a second copy of any gradient: norms are one number per tensor, the scaling is in place.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm is not None and gradients:
            scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, scale)
        return total_norm
