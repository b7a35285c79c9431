"""What can be decided about optimizer state: in how many bits the two AdamW moments are kept."""

from dataclasses import dataclass
from typing import Literal

QUANTIZATION_BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale in 8-bit state (Dettmers et al., 8-bit Optimizers via Block-wise Quantization)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStatePlan:
    """AdamW's moments on the device. bf16 weights add fp32 master weights, whatever the bits."""

    bits: Literal[32, 8] = 32
    """32 keeps fp32 moments (lossless); 8 keeps one byte per element and one fp32 scale per block."""
