"""Rule for attention with fewer heads of keys than of queries on CUDA: where no fused kernel takes such heads as they are, the
runtime repeats keys and values for the length of a kernel's call, and the estimate counts the copies.

Torch's plain products, which would run otherwise, keep the scores of every pair of tokens until backward. By ``sdp_utils.cpp`` of
torch 2.11 to 2.13: flash attention takes grouped heads, but only in 16 bits, from compute capability 8.0 on and up to a width of
256; the memory-efficient kernel takes them from 2.14 on. Torch-free.
"""

from dataclasses import dataclass
from typing import Final

_AMPERE: Final = (8, 0)
_EFFICIENT_TAKES_GROUPS_SINCE: Final = (2, 14)
_WIDEST_FLASH: Final = 256


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """The fused attention kernels of one card, asked about heads of one width."""

    dtype: str
    """``fp32``, ``bf16`` or ``fp16``."""
    head_dim: int
    capability: tuple[int, int]
    """Compute capability of the card."""
    torch_version: tuple[int, int] | None
    """None is taken for one before 2.14."""

    @property
    def has_flash(self) -> bool:
        """True if flash attention takes such heads, grouped or not, where there is no mask."""
        return self.dtype != "fp32" and self.capability >= _AMPERE and self.head_dim <= _WIDEST_FLASH

    @property
    def is_efficient(self) -> bool:
        """True if the memory-efficient kernel takes heads of this width, as many of keys as of queries."""
        multiple = 8 if self.dtype != "fp32" else 4 if self.capability >= _AMPERE else 1
        return self.head_dim % multiple == 0 and (self.dtype != "bf16" or self.capability >= _AMPERE)

    @property
    def takes_groups(self) -> bool:
        """True if the memory-efficient kernel takes fewer heads of keys."""
        return self.torch_version is not None and self.torch_version >= _EFFICIENT_TAKES_GROUPS_SINCE

    @property
    def repeats_key_heads(self) -> bool:
        """True if grouped heads without a mask are repeated."""
        return self.is_efficient and not self.has_flash and not self.takes_groups
