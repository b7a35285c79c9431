"""Attention with fewer heads of keys than of queries, on cards and in dtypes whose fused kernels do not take them.

Torch would make plain products there: the scores of every pair of tokens, kept until backward. Here keys and values are repeated
for a fused kernel's call and dropped after it, forward and backward, so that what is saved is what the trace says: queries, keys,
values, the result and its sums (``formats/key_heads.py`` has the rule). The results differ from plain products by rounding.

While a model is watched, ``torch.nn.functional.scaled_dot_product_attention`` is a function of this module, which gives every
other call to torch's own. *Not taken*: masks, and blocks that are compiled.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.nn import functional

from optimizer.formats.key_heads import FusedAttention
from optimizer.runtime.device.backends import backend_of

_DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NAME: Final = "scaled_dot_product_attention"
_POSITIONAL: Final = ("attn_mask", "dropout_p", "is_causal")
"""Arguments that torch's function also takes by their place, after the tensors."""
_ops: Any = torch.ops.aten


class Heads(NamedTuple):
    """Operands of a kernel. query: [batch, heads, length, channels]. key, value: [batch, heads, keys, channels]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    scale: float | None


class AttentionKernel(Protocol):
    """A fused kernel that takes as many heads of keys as of queries."""

    def attend(self, heads: Heads, *, is_saved: bool) -> tuple[torch.Tensor, ...]:
        """The result, and what backward needs beside it. is_saved: whether a backward follows."""

    def go_back(self, gradient: torch.Tensor, heads: Heads, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Gradients of queries, keys and values. saved: what ``attend`` returned."""


class EfficientKernel:
    """CUDA's memory-efficient one."""

    def attend(self, heads: Heads, *, is_saved: bool) -> tuple[torch.Tensor, ...]:
        query, key, value, is_causal, scale = heads
        found: tuple[torch.Tensor, ...] = _ops._scaled_dot_product_efficient_attention(
            query, key, value, None, is_saved, 0.0, is_causal, scale=scale
        )
        return found

    def go_back(self, gradient: torch.Tensor, heads: Heads, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        wanted = [True, True, True, False]
        found: tuple[torch.Tensor, ...] = _ops._scaled_dot_product_efficient_attention_backward(
            gradient, *heads[:3], None, *saved, 0.0, wanted, heads.is_causal, scale=heads.scale
        )
        return found[:3]


class _Patch:
    """The process has one."""

    def __init__(self) -> None:
        self.num_watched = 0
        self.torchs: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention

    def begin(self) -> None:
        if self.num_watched == 0:
            self.torchs = functional.scaled_dot_product_attention
            setattr(functional, _NAME, _attend)
        self.num_watched += 1

    def end(self) -> None:
        self.num_watched -= 1
        if self.num_watched == 0 and functional.scaled_dot_product_attention is _attend:
            setattr(functional, _NAME, self.torchs)


_PATCH: Final = _Patch()
_EFFICIENT: Final = EfficientKernel()


def watch_attention(device: torch.device) -> Callable[[], None]:
    """Have grouped heads repeated where that is needed on this device; returns a function that ends it."""
    if device.type != "cuda" or torch.version.hip is not None or backend_of(device).capability is None:
        return lambda: None
    _PATCH.begin()
    has_ended = False

    def end() -> None:
        nonlocal has_ended
        if not has_ended:
            has_ended = True
            _PATCH.end()

    return end


def attend_repeated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: AttentionKernel = _EFFICIENT,
) -> torch.Tensor:
    """query: [batch, heads, length, channels]. key, value: [batch, key heads, keys, channels], of which the heads are a multiple.
    Returns [batch, heads, length, channels].
    """
    result: torch.Tensor = _RepeatedHeads.apply((is_causal, scale, kernel), query, key, value)  # type: ignore[no-untyped-call]
    return result


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    settings = {**dict(zip(_POSITIONAL, args, strict=False)), **named}
    is_plain = settings.get("attn_mask") is None and not settings.get("dropout_p") and not torch.compiler.is_compiling()
    if is_plain and settings.get("enable_gqa") and query.dim() == 4:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
        if _is_repeated(query, key, dtype):
            heads = (tensor.to(dtype) for tensor in (query, key, value))  # as autocast does for torch's own
            return attend_repeated(*heads, is_causal=bool(settings.get("is_causal")), scale=settings.get("scale"))
    return _PATCH.torchs(query, key, value, **settings)


def _is_repeated(query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> bool:
    capability = backend_of(query.device).capability
    if capability is None or dtype not in _DTYPES or key.shape[1] == query.shape[1]:
        return False
    return FusedAttention(
        dtype=_DTYPES[dtype], head_dim=query.shape[-1], capability=capability, torch_version=_torch_version()
    ).repeats_key_heads


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class _RepeatedHeads(torch.autograd.Function):
    """Attention through a kernel that takes no groups."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[bool, float | None, AttentionKernel],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        is_causal, scale, kernel = settings
        is_saved = any(ctx.needs_input_grad)
        heads = Heads(query, _repeat(key, query), _repeat(value, query), is_causal, scale)
        result, *beside = kernel.attend(heads, is_saved=is_saved)
        if is_saved:
            ctx.save_for_backward(query, key, value, result, *beside)
            ctx.settings = settings
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        is_causal, scale, kernel = ctx.settings
        heads = Heads(query, _repeat(key, query), _repeat(value, query), is_causal, scale)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        of_query, of_keys, of_values = kernel.go_back(gradient, heads, tuple(saved))
        del heads
        return None, of_query, _add_up(of_keys, key), _add_up(of_values, value)


def _repeat(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    batch, num_heads, length, channels = heads.shape
    times = query.shape[1] // num_heads
    return heads[:, :, None].expand(batch, num_heads, times, length, channels).reshape(batch, -1, length, channels)


def _add_up(gradient: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """The sum of what the copies of each head were given."""
    batch, num_heads, length, channels = heads.shape
    return gradient.reshape(batch, num_heads, -1, length, channels).sum(dim=2)
