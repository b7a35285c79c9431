"""What the optimizer's moments of one tensor weigh on the device. Torch-free.

Source of the 8-bit layout: bitsandbytes (``optim/optimizer.py``): one byte per element and moment, one fp32 scale per
256 elements and moment, tensors under 4096 elements in 32 bits, two shared tables of 256 fp32 values.
"""

from dataclasses import dataclass

from optimizer.plan.optimizer_state import (
    MIN_8BIT_ELEMENTS,
    QUANTIZATION_BLOCK_ELEMENTS,
    UPDATE_PIECE_ELEMENTS,
    update_scratch_bytes,
)

TABLES_BYTES = 2 * 256 * 4
"""Of 8-bit state, once: made with the optimizer, not by its first step."""
STEP_COUNTER_BYTES = 4
"""torch's fused AdamW counts steps in one fp32 scalar per tensor."""
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of one optimizer, which a tensor gets in its first update and keeps."""

    bits: int
    num: int
    """2 of AdamW, 1 of SGD with momentum, 0 without."""

    def of(self, num_elements: int) -> int:
        """Bytes on the device; with 32 bits AdamW's count of steps, too."""
        if self.bits == 32 or num_elements < MIN_8BIT_ELEMENTS:
            return self.num * _FP32_BYTES * num_elements + self.counter_bytes
        return self.num * (num_elements + _FP32_BYTES * -(-num_elements // QUANTIZATION_BLOCK_ELEMENTS))

    @property
    def counter_bytes(self) -> int:
        """Of each tensor: only AdamW, which alone has two moments, counts its steps; bitsandbytes does it outside torch."""
        return STEP_COUNTER_BYTES if self.num == 2 and self.bits == 32 else 0

    def scratch_of(self, num_elements: int, *, device_kind: str) -> int:
        """Bytes that an update of one tensor holds on the device while it runs; torch's own kernels hold none."""
        if self.bits == 32 or device_kind != "cpu":
            return 0
        if num_elements < MIN_8BIT_ELEMENTS:
            return update_scratch_bytes(num_elements, bits=32)
        return update_scratch_bytes(min(num_elements, UPDATE_PIECE_ELEMENTS), bits=8)
