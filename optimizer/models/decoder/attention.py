"""The decoder's four kinds of causal attention, as functions of queries, keys and values.

full          every earlier token; torch's fused kernels.
local         the last ``local_window`` tokens, itself included (Longformer, arXiv 2004.05150, one-sided).
block_sparse  the own and the preceding blocks, ``sparse_local_blocks`` in all, and the first ``sparse_global_blocks`` of the
              sequence (Sparse Transformer, arXiv 1904.10509; BigBird, arXiv 2007.14062, without its random blocks).
linear        phi(q) . phi(k) in place of exp(q . k), normalized (Katharopoulos et al., arXiv 2006.16236); made in blocks: inside
              one the small square of products, before it one running sum of outer products for each block.

local and block_sparse run one fused call over all blocks of queries at once, each with the keys it may see laid beside it, so
that memory grows with the sequence and not with its square. These copies and linear attention's sums are large: callers run a
few heads at a time and save none of them for backward (``attention_node.py``). No kind loops over the sequence: the ops are the
same for every length. Lengths that are no multiple of the block are padded, the shortest to the global blocks.

Queries are [batch, heads, length, head_dim]; keys and values the same with as many heads or fewer, each used by as many
neighbouring query heads. Results are [batch, length, heads * head_dim].
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

FeatureMap = Literal["elu", "relu"]
_DENOMINATOR_FLOOR = 1e-6
"""Added to what linear attention divides by; relu may map all keys to zero."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The keys that each block of queries sees; ``window`` None: whole blocks."""

    block: int
    num_local: int
    """Blocks up to the own one."""
    num_global: int = 0
    """Blocks from the first of the sequence."""
    window: int | None = None

    @property
    def local_keys(self) -> int:
        return self.block * self.num_local

    @property
    def global_keys(self) -> int:
        return self.block * self.num_global

    def padded_length(self, length: int) -> int:
        return max(-(-length // self.block) * self.block, self.global_keys)


def full_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float = 0.0, is_causal: bool = True
) -> torch.Tensor:
    """is_causal: False for the newest token alone, which sees every key there is."""
    result = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=is_causal, enable_gqa=key.shape[1] != query.shape[1]
    )
    return result.transpose(1, 2).flatten(2)


def make_mask(pattern: Pattern, length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The mask added to scores, [blocks, 1, block, global and local keys].

    length: of the sequence, before it is padded.
    """
    padded = pattern.padded_length(length)
    # Local keys look alike from every block, but for those that lie before the sequence or are global ones.
    row = torch.arange(pattern.local_keys - pattern.block, pattern.local_keys, device=device).unsqueeze(1)
    distance = row - torch.arange(pattern.local_keys, device=device)
    near = distance >= 0 if pattern.window is None else (distance >= 0) & (distance < pattern.window)
    # Views of one row of places; with a number for each block, sizes would be no whole multiples of the length.
    is_local = torch.arange(pattern.block - pattern.local_keys, padded, device=device) >= pattern.global_keys
    seen = near & is_local.unfold(0, pattern.local_keys, pattern.block).unsqueeze(1)
    if pattern.num_global:
        query = torch.arange(padded, device=device)
        seen = torch.cat((query[: pattern.global_keys] <= query.view(-1, pattern.block, 1), seen), dim=2)
    lowest = torch.full((), float("-inf"), dtype=dtype, device=device)
    return torch.where(seen, torch.zeros((), dtype=dtype, device=device), lowest).unsqueeze(1)


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pattern: Pattern,
    mask: torch.Tensor,
    dropout: float = 0.0,
) -> torch.Tensor:
    """mask: ``make_mask`` of the pattern and the length."""
    batch, heads, length, dim = query.shape
    query, key, value = (_pad_end(tensor, pattern.padded_length(length)) for tensor in (query, key, value))
    # Blocks first, batch and heads together: the mask, which differs by block alone, is then broadcast over the rest.
    queries = _cut(query, 2, (-1, pattern.block)).permute(2, 0, 1, 3, 4)
    queries = queries.reshape(-1, batch * heads, pattern.block, dim)
    result = F.scaled_dot_product_attention(
        queries,
        _lay_beside(key, pattern),
        _lay_beside(value, pattern),
        attn_mask=mask,
        dropout_p=dropout,
        enable_gqa=key.shape[1] != heads,
    )
    result = _cut(result, 1, (batch, heads)).permute(1, 0, 3, 2, 4).reshape(batch, -1, heads * dim)
    return result[:, :length]


def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block: int, feature_map: FeatureMap
) -> torch.Tensor:
    """Sums along the sequence are made in fp32 at least."""
    batch, heads, length, dim = query.shape
    num_groups, per_group = key.shape[1], heads // key.shape[1]
    padded = -(-length // block) * block
    query, key = (_apply_feature_map(tensor, feature_map) for tensor in (query, key))
    query, key, value = (_pad_end(tensor, padded) for tensor in (query, key, value))
    # The query heads of a group stand one below the other, so that keys and values are not repeated.
    queries = query.view(batch, num_groups, per_group, -1, block, dim).transpose(2, 3)
    queries = queries.reshape(batch, num_groups, -1, per_group * block, dim)
    keys, values = (tensor.reshape(batch, num_groups, -1, block, dim) for tensor in (key, value))
    ones = torch.ones(block, block, dtype=torch.bool, device=query.device)
    scores = _cut(queries @ keys.transpose(3, 4), 3, (per_group, block)).masked_fill(ones.triu(1), 0.0)
    inside = scores.flatten(3, 4) @ values
    before = queries @ _sum_before(keys.transpose(3, 4) @ values)
    total = inside + before
    total = total.view(batch, num_groups, -1, per_group, block, dim)
    key_sums = _sum_along(keys.flatten(2, 3))
    key_sums = key_sums.view(batch, num_groups, -1, 1, block, dim)
    divisor = (queries.view_as(total) * key_sums).sum(-1, keepdim=True) + _DENOMINATOR_FLOOR
    result = (total / divisor).permute(0, 2, 4, 1, 3, 5).reshape(batch, padded, heads * dim)
    return result[:, :length]


def _sum_before(states: torch.Tensor) -> torch.Tensor:
    """Sum over all earlier blocks, along dimension 2."""
    return _sum_along(F.pad(states, (0, 0, 0, 0, 1, -1)))


def _sum_along(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.cumsum(tensor, dim=2, dtype=wide).to(tensor.dtype)


def _apply_feature_map(tensor: torch.Tensor, feature_map: FeatureMap) -> torch.Tensor:
    return F.relu(tensor) if feature_map == "relu" else F.elu(tensor) + 1


def _cut(tensor: torch.Tensor, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    """One dimension becomes two."""
    cut: torch.Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return cut


def _pad_end(tensor: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - tensor.shape[2]
    return F.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def _lay_beside(tensor: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Keys or values as each block of queries sees them: [blocks, batch * heads, global and local keys, dim]."""
    padded = F.pad(tensor, (0, 0, pattern.local_keys - pattern.block, 0))
    seen = padded.unfold(2, pattern.local_keys, pattern.block).permute(2, 0, 1, 4, 3)
    if pattern.num_global:
        shared = tensor[:, :, : pattern.global_keys].unsqueeze(0).expand(seen.shape[0], -1, -1, -1, -1)
        seen = torch.cat((shared, seen), dim=3)
    return seen.flatten(1, 2).contiguous()
