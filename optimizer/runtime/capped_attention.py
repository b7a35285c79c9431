"""Attention whose scores are capped (Gemma 2), with what lies between its two products as one node of the graph.

No fused kernel caps scores, so transformers runs six ops over them, each with a tensor of its own: scores for every pair of
tokens of every head. Between the same two products here the same ops write over one another where autograd needs no copy, in
forward and in backward. The numbers are the same to the bit.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_IMPLEMENTATION: Final = "headroom_capped"
_CAP_KEY: Final = "attn_logit_softcapping"


def lighten_capped_attention(model: nn.Module) -> Callable[[], None]:
    """For models of transformers that cap scores and attend op by op; returns a function that ends it."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, _CAP_KEY, None) or getattr(config, "_attn_implementation", None) != "eager":
        return lambda: None
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(_IMPLEMENTATION, eager_mask)
    config._attn_implementation = _IMPLEMENTATION

    def undo() -> None:
        config._attn_implementation = "eager"

    return undo


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers calls attention. query: [batch, heads, length, channels]."""
    models: Any = sys.modules[type(module).__module__]
    given: Any = module
    is_watched = torch.is_grad_enabled() and not torch.is_autocast_enabled(query.device.type)
    if not is_watched or softcap is None or scaling is None:
        result: tuple[torch.Tensor, torch.Tensor] = models.eager_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, softcap=softcap, **others
        )
        return result
    keys = models.repeat_kv(key, given.num_key_value_groups)
    values = models.repeat_kv(value, given.num_key_value_groups)
    shares: torch.Tensor = _Shares.apply(  # type: ignore[no-untyped-call]
        torch.matmul(query, keys.transpose(2, 3)), attention_mask, scaling, softcap
    )
    shares = nn.functional.dropout(shares, p=dropout, training=module.training)
    return torch.matmul(shares, values).transpose(1, 2).contiguous(), shares


class _Shares(torch.autograd.Function):
    """From products of queries and keys to what each key's value counts."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None, scaling: float, cap: float) -> torch.Tensor:
        """scores: [batch, heads, queries, keys]. mask: added to them."""
        # The products' own tensor is not written to: selective recomputation keeps it.
        capped = (scores * scaling).div_(cap).tanh_()
        masked = capped * cap
        if mask is not None:
            masked = masked + mask if mask.dtype != masked.dtype else masked.add_(mask)
        exact = torch.softmax(masked, dim=-1, dtype=torch.float32)
        ctx.save_for_backward(capped, exact)
        ctx.factors = scaling, cap
        return exact.to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        capped, exact = ctx.saved_tensors
        scaling, cap = ctx.factors
        masked = torch._softmax_backward_data(gradient.float(), exact, -1, torch.float32).to(capped.dtype)
        del gradient, exact
        scores = torch.ops.aten.tanh_backward(masked.mul_(cap), capped)
        return scores.div_(cap).mul_(scaling), None, None, None
