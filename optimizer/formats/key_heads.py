"""Rule for attention with fewer heads of keys than of queries on CUDA: where no fused kernel takes such heads as they are, the
runtime repeats keys and values for the length of a kernel's call, and the estimate counts the copies.

Torch's plain products, which would run otherwise, keep the scores of every pair of tokens until backward. By ``sdp_utils.cpp`` of
torch 2.11 to 2.13: flash attention takes grouped heads, but only in 16 bits, from compute capability 8.0 on and up to a width of
256; the memory-efficient kernel takes them from 2.14 on. Torch-free.
"""

from dataclasses import dataclass
from typing import Final

AMPERE: Final = (8, 0)
_EFFICIENT_TAKES_GROUPS_SINCE: Final = (2, 14)
WIDEST_FLASH: Final = 256


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The fused kernels of one card, and heads of one width."""

    dtype: str
    """``fp32``, ``bf16`` or ``fp16``."""
    head_dim: int
    capability: tuple[int, int]
    """Compute capability of the card."""
    torch_version: tuple[int, int] | None
    """None is taken for one before 2.14."""

    @property
    def is_efficient(self) -> bool:
        """True if the memory-efficient kernel takes heads of this width, as many of keys as of queries."""
        multiple = 8 if self.dtype != "fp32" else 4 if self.capability >= AMPERE else 1
        return self.head_dim % multiple == 0 and (self.dtype != "bf16" or self.capability >= AMPERE)

    @property
    def takes_groups(self) -> bool:
        """True if the memory-efficient kernel takes fewer heads of keys."""
        return self.torch_version is not None and self.torch_version >= _EFFICIENT_TAKES_GROUPS_SINCE

    @property
    def repeats_key_heads(self) -> bool:
        """True if grouped heads without a mask are repeated."""
        has_flash = self.dtype != "fp32" and self.capability >= AMPERE and self.head_dim <= WIDEST_FLASH
        return self.is_efficient and not has_flash and not self.takes_groups
