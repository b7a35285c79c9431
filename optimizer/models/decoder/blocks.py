"""One block of the decoder: attention and MLP, each with its norms and added to the residual stream."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.formats.run_again import cheap_to_run_again
from optimizer.models.decoder.attention import (
    Pattern,
    blocked_attention,
    full_attention,
    linear_attention,
    make_mask,
)
from optimizer.models.decoder.attention_hook import attend_of
from optimizer.models.decoder.attention_node import Attend, Heads, attend_by_runs
from optimizer.models.decoder.config import num_key_blocks

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [length, head_dim]."""


QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Each [batch, heads, length, head_dim]."""


class KvCache(Protocol):
    """Keys and values of the tokens so far (``runtime/generation/kv_cache.py``)."""

    def get_seq_length(self) -> int: ...
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32 (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


def make_norm(config: Any, *, dtype: torch.dtype) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.use_bias, dtype=dtype)


def make_pattern(kind: str, config: Any) -> Pattern | None:
    """None for kinds that need no mask."""
    if kind not in ("local", "block_sparse"):
        return None
    is_local = kind == "local"
    return Pattern(
        block=config.attention_block,
        num_local=num_key_blocks(kind, config.to_dict()),
        num_global=0 if is_local else config.sparse_global_blocks,
        window=config.local_window if is_local else None,
    )


def _groups_at_once(kind: str, config: Any) -> int:
    """One wherever sizes are then whole multiples of the length: linear attention has a sum of outer products for each block."""
    num_groups, dim = config.num_key_value_heads, config.head_dim
    if kind != "linear":
        return 1
    fitting = (num for num in range(1, num_groups) if not num_groups % num and not num * dim * dim % config.attention_block)
    return next(fitting, num_groups)


class Attention(nn.Module):
    """Projections around one kind of attention."""

    def __init__(self, config: Any, kind: str, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.kind = kind
        self.pattern = make_pattern(kind, config)
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        wide, narrow = self.num_heads * config.head_dim, self.num_groups * config.head_dim
        self.sizes = (wide, narrow, narrow)
        self.heads = Heads(
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            head_dim=config.head_dim,
            groups_at_once=_groups_at_once(kind, config),
        )
        options: dict[str, Any] = {"bias": config.use_bias, "dtype": dtype}
        if config.fused_qkv:
            self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), **options)
        else:
            self.q_proj = nn.Linear(config.hidden_size, wide, **options)
            self.k_proj = nn.Linear(config.hidden_size, narrow, **options)
            self.v_proj = nn.Linear(config.hidden_size, narrow, **options)
        self.o_proj = nn.Linear(wide, config.hidden_size, **options)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        cache: KvCache | None = None,
        index: int = 0,
    ) -> torch.Tensor:
        is_fused = self.config.fused_qkv
        names = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
        projected = tuple(getattr(self, name)(hidden) for name in names)
        if cache is None and self.kind != "full" and not self.dropout:
            return self._project(
                attend_by_runs(projected, constants=rotary or (), heads=self.heads, prepare=self._prepare)
            )
        columns = projected[0].split(self.sizes, dim=-1) if is_fused else projected
        query, key, value = self._rotated_heads(columns, rotary)
        if cache is not None:
            seen = cache.update(key, value, index)
            if query.shape[2] == 1:
                return self._project(_attend_newest(query, *seen))
            if self.kind == "full":
                # The same numbers; what was projected goes before attention.
                key, value = seen
        mask = self._make_mask(query.shape[2], query)
        return self._project(self._attend(query, key, value, mask, dropout=self.dropout))

    @property
    def dropout(self) -> float:
        """On attention weights."""
        return self.config.attention_dropout if self.training and self.kind != "linear" else 0.0

    def _prepare(self, projected: torch.Tensor, constants: Sequence[torch.Tensor]) -> Attend:
        """constants: cosines and sines where positions are rotary."""
        rotary = (constants[0], constants[1]) if constants else None
        mask = self._make_mask(projected.shape[1], projected)
        return lambda columns: self._attend(*self._rotated_heads(columns, rotary), mask, dropout=0.0)

    def _make_mask(self, length: int, like: torch.Tensor) -> torch.Tensor | None:
        if self.pattern is None:
            return None
        return make_mask(self.pattern, length, dtype=like.dtype, device=like.device)

    def _rotated_heads(self, columns: Sequence[torch.Tensor], rotary: Rotary | None) -> QueryKeyValue:
        """columns: of queries, keys and values."""
        query, key, value = (cut_heads(part, self.config.head_dim) for part in columns)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return query, key, value

    def _project(self, attended: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.o_proj(attended)
        return projected

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        dropout: float,
    ) -> torch.Tensor:
        if self.kind == "full":
            return full_attention(query, key, value, dropout=dropout)
        if self.kind == "linear":
            block, feature_map = self.config.attention_block, self.config.linear_feature_map
            # Its products are cheap, and more bytes than all else that a block keeps.
            with cheap_to_run_again():
                return linear_attention(query, key, value, block=block, feature_map=feature_map)
        assert self.pattern is not None
        assert mask is not None
        return blocked_attention(query, key, value, pattern=self.pattern, mask=mask, dropout=dropout)


def _attend_newest(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend for the newest token alone, which sees every key there is."""
    attend = attend_of(key)
    if attend is None:
        return full_attention(query, key, value, is_causal=False)
    return attend(query, scaling=None, softcap=None).flatten(2)


class MLP(nn.Module):
    """swiglu: two products into the inner width, one of them through SiLU (arXiv 2002.05202); gelu: one, through GELU."""

    def __init__(self, config: Any, *, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": config.use_bias, "dtype": dtype}
        self.is_gated = config.activation == "swiglu"
        if self.is_gated:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, **options)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, **options)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden) if self.is_gated else F.gelu(self.up_proj(hidden))
        result: torch.Tensor = self.down_proj(inner)
        return result


class Block(nn.Module):
    """pre: ``x + f(norm(x))``; post: ``norm(x + f(x))``; both: ``x + norm(f(norm(x)))``."""

    def __init__(self, config: Any, kind: str, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.place = config.norm_place
        self.attention = Attention(config, kind, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)
        names = [name for name in ("pre", "post") if self.place in (name, "both")]
        for name in names:
            setattr(self, f"{name}_attention_norm", make_norm(config, dtype=dtype))
            setattr(self, f"{name}_mlp_norm", make_norm(config, dtype=dtype))

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        cache: KvCache | None = None,
        index: int = 0,
    ) -> torch.Tensor:
        """index: of the block, by which the cache knows it."""
        hidden = hidden_states
        attended = self.attention(
            self._before("attention", hidden), rotary=rotary, cache=cache, index=index
        )
        hidden = self._after("attention", hidden, attended)
        return self._after("mlp", hidden, self.mlp(self._before("mlp", hidden)))

    def _before(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.place == "post" else getattr(self, f"pre_{name}_norm")(hidden)

    def _after(self, name: str, hidden: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self.place == "both":
            made = getattr(self, f"post_{name}_norm")(made)
        if self.dropout:
            made = F.dropout(made, self.dropout, self.training)
        hidden = hidden + made
        return getattr(self, f"post_{name}_norm")(hidden) if self.place == "post" else hidden


def cut_heads(columns: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, heads, length, head_dim] of [batch, length, heads * head_dim]."""
    heads: torch.Tensor = columns.unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2)


def rotate(tensor: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotary position embeddings on [..., length, head_dim], halves paired (arXiv 2104.09864)."""
    cosines, sines = rotary
    low, high = tensor.chunk(2, dim=-1)
    return tensor * cosines + torch.cat((-high, low), dim=-1) * sines


def make_rotary(
    length: int, *, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device, first: int = 0
) -> Rotary:
    """Angles are made in fp32. first: position of the first of ``length`` tokens."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(first, first + length, device=device, dtype=torch.float32), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
