"""What can be decided about activations: for each block, whether what autograd saves is kept, rebuilt or moved."""

from dataclasses import dataclass
from typing import Literal

BlockChoice = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True, kw_only=True)
class ActivationsPlan:
    """One choice for each block, first to last.

    keep       what autograd saves stays on the device until the block's backward.
    recompute  only the block's inputs stay; the block runs forward again just before its backward.
    offload    what autograd saves inside the block is copied to the host as it appears and back before its backward.
    """

    per_block: tuple[BlockChoice, ...]

    def count(self, choice: BlockChoice) -> int:
        return self.per_block.count(choice)
