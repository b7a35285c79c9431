"""Decisions about activations: for each block, whether the tensors that autograd saves are kept, rebuilt or moved."""

from dataclasses import dataclass
from typing import Final, Literal

BlockChoice = Literal["keep", "recompute", "selective", "offload", "offload_disk", "offload_remote"]
Compression = Literal["none", "bf16", "int8"]

OFFLOADING: Final[tuple[BlockChoice, ...]] = ("offload", "offload_disk", "offload_remote")
REBUILDING: Final[tuple[BlockChoice, ...]] = ("recompute", "selective")


@dataclass(frozen=True, kw_only=True)
class ActivationsPlan:
    """One choice for each block, first to last.

    keep            the tensors that autograd saves stay on the device until the block's backward.
    recompute       only the block's inputs stay; the block runs forward again just before its backward.
    selective       as recompute, but the results of products and attention stay: only the cheap ops run again.
    offload         saved tensors are copied to the host as they appear, and back before the block's backward.
    offload_disk    the same, to a file.
    offload_remote  the same, to the memory of another machine (a store that speaks the Redis protocol).
    """

    per_block: tuple[BlockChoice, ...]
    compress: Compression = "none"
    """Format in which floating-point tensors travel, to any place: unchanged, bf16, or int8 with one fp32 scale for each 256
    elements. Lossy, except for bf16 tensors that travel as bf16."""

    def count(self, *choices: BlockChoice) -> int:
        return sum(map(self.per_block.count, choices))

    @property
    def num_offloaded(self) -> int:
        """Blocks whose saved tensors leave the device, wherever they go."""
        return self.count(*OFFLOADING)
