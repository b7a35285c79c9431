"""Frozen linear layers with 2:4 sparse weights: of four neighbours along the input the two largest are kept.

On CUDA cards with kernels for it the weight is held packed (a half of the numbers, two bits of place for each) and multiplied so;
results differ from the pruned dense product by the rounding of the kernel. On the CPU there is no such kernel: products are
made of the pruned dense weight, and no memory is saved. Pruning changes the model; it is not undone, and gradients reach the
input alone. Mishra et al., Accelerating Sparse Deep Neural Networks (arXiv 2104.08378).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.base.errors import InvalidPlan

MIN_CAPABILITY = (8, 0)
_GROUP = 4
_KEPT = 2
_FIELD = "plan.weights.frozen"


def prune_2_to_4(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` with the two smallest of each four neighbours in a row set to zero; of equals the first are kept.

    weight: [out, in], ``in`` a multiple of 4. Raises InvalidPlan otherwise.
    """
    if weight.dim() != 2 or weight.shape[1] % _GROUP:
        raise _refusal(f"a matrix of shape {list(weight.shape)}", "matrices whose inputs are a multiple of 4")
    groups = weight.reshape(-1, _GROUP)
    largest = groups.abs().argsort(dim=1, descending=True, stable=True)[:, :_KEPT]
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, largest, torch.ones_like(largest, dtype=torch.bool))
    return torch.where(kept, groups, 0).view(weight.shape)


def check_semi_structured(device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidPlan where packed 2:4 products cannot run: no CUDA, an older card, or a dtype without kernels."""
    if device.type != "cuda":
        raise _refusal(f"the device {device.type}", "CUDA cards of compute capability 8.0 or later")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = f"a card of compute capability {capability[0]}.{capability[1]}"
        raise _refusal(found, "CUDA cards of compute capability 8.0 or later")
    if dtype not in (torch.bfloat16, torch.float16):
        raise _refusal(f"weights in {dtype}", "bf16 and fp16 weights")


def make_semi_structured(linear: nn.Linear, *, device: torch.device) -> "SemiStructuredLinear":
    """Stand-in for a frozen linear layer, packed on a CUDA device. Raises InvalidPlan where it cannot be."""
    check_semi_structured(device, linear.weight.dtype)
    pruned = prune_2_to_4(linear.weight.detach().to(device))
    return SemiStructuredLinear(torch.sparse.to_sparse_semi_structured(pruned), bias=_frozen_bias(linear, device))


def make_reference(linear: nn.Linear) -> "SemiStructuredLinear":
    """The same layer from the pruned dense weight, on any device: what the packed one is held against."""
    return SemiStructuredLinear(prune_2_to_4(linear.weight.detach()), bias=_frozen_bias(linear, linear.weight.device))


class SemiStructuredLinear(nn.Module):
    """Holds a pruned weight, packed or dense; its gradient is that of the input alone."""

    def __init__(self, weight: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Product.apply(hidden, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    """``hidden @ weight.T + bias``; keeps the weight for backward and no input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Not by save_for_backward: saved-tensor hooks ask for a storage, which a packed weight has none of its own.
        ctx.weight = weight
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        # The transposed of a product with the packed weight first, as its kernels take it.
        return (ctx.weight.t() @ rows.t()).t().reshape(*gradient.shape[:-1], -1), None, None


def _frozen_bias(linear: nn.Linear, device: torch.device) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach().to(device)


def _refusal(found: str, allowed: str) -> InvalidPlan:
    return InvalidPlan(
        f"2:4 sparse frozen weights were asked for with {found}; allowed: {allowed}",
        field=_FIELD,
        value=found,
        allowed=allowed,
    )
