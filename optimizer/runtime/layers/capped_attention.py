"""Attention whose scores are capped (Gemma 2) as one node of the graph.

No fused kernel caps scores, so transformers runs six ops over them, each with a tensor of its own: scores for every pair of
tokens of every head. Here constant factors go to queries and gradients, which are small; what is left are three passes over
scores forward and two backward, where the chain has six and five. Heads that share keys are rows of one product, in place of
copies of the keys. The numbers are the chain's but for the order of roundings.
"""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

_IMPLEMENTATION: Final = "headroom_capped"
_CAP_KEY: Final = "attn_logit_softcapping"


def replace_capped_attention(model: nn.Module) -> Callable[[], None]:
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with the arguments that transformers passes. query: [batch, heads, length, channels]; of keys and values
    there may be fewer heads."""
    is_watched = torch.is_grad_enabled() and not torch.is_autocast_enabled(query.device.type)
    if is_watched and softcap is not None and scaling is not None and attention_mask is not None and not dropout:
        return _CappedAttention.apply(query, key, value, attention_mask, scaling, softcap), None  # type: ignore[no-untyped-call]
    models: Any = sys.modules[type(module).__module__]
    result: tuple[torch.Tensor, torch.Tensor] = models.eager_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, softcap=softcap, **others
    )
    return result


def _multiply_in_order(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The product, whose elements lie in the order of its dimensions, in one pass over the tensor."""
    if isinstance(tensor, FunctionalTensor):  # captured for the compiler, which takes no heed of how ``out`` lies
        return torch.mul(tensor, factor).contiguous()
    product = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.mul(tensor, factor, out=product)


class _CappedAttention(torch.autograd.Function):
    """softmax(cap tanh(scaling q k' / cap) + mask) v."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        cap: float,
    ) -> torch.Tensor:
        """query: [batch, heads, length, channels]. key, value: [batch, key heads, keys, channels]. mask: added to scores, which
        it broadcasts to. Returns [batch, length, heads, channels].
        """
        batch, heads, length, _ = query.shape
        groups = batch * key.shape[1]
        queries = _multiply_in_order(query, scaling / cap).view(groups, -1, query.shape[-1])
        keys, values = key.reshape(groups, *key.shape[2:]), value.reshape(groups, *value.shape[2:])
        capped = torch.bmm(queries, keys.transpose(1, 2)).tanh()
        masked = torch.add(mask, capped.view(batch, heads, length, -1), alpha=cap)
        exact = torch.softmax(masked, dim=-1, dtype=torch.float32)
        del masked
        ctx.save_for_backward(queries, keys, values, capped, exact)
        ctx.factors = scaling, cap
        shares = exact.to(query.dtype).view(capped.shape)
        result = torch.bmm(shares, values).view(batch, heads, length, -1)
        return result.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values, capped, exact = ctx.saved_tensors
        scaling, cap = ctx.factors
        batch, heads, length, num_keys = exact.shape
        groups = keys.shape[0]
        gradient = gradient.transpose(1, 2).reshape(groups, -1, values.shape[-1])
        of_values = torch.bmm(exact.to(queries.dtype).view(capped.shape).transpose(1, 2), gradient)
        of_shares = torch.bmm(gradient, values.transpose(1, 2)).view(exact.shape).float()
        del gradient
        of_masked = torch._softmax_backward_data(of_shares, exact, -1, torch.float32)
        del of_shares, exact
        # Of scores over the cap; what is missing are factors, which queries' and keys' gradients are given.
        of_scores = torch.ops.aten.tanh_backward(of_masked.to(capped.dtype).view(capped.shape), capped)
        del of_masked, capped
        of_queries = torch.bmm(of_scores, keys).mul_(scaling).view(batch, heads, length, -1)
        of_keys = torch.bmm(of_scores.transpose(1, 2), queries).mul_(cap)
        key_heads = groups // batch
        return (
            of_queries,
            of_keys.view(batch, key_heads, num_keys, -1),
            of_values.view(batch, key_heads, num_keys, -1),
            None,
            None,
            None,
        )
