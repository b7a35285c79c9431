"""Bytes of the optimizer's moments of one tensor on the device. Torch-free.

Source of the 8-bit layout: bitsandbytes (``optim/optimizer.py``): one byte per element and moment, one fp32 scale per
256 elements and moment, tensors under 4096 elements in 32 bits, two shared tables of 256 fp32 values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from optimizer.optimizers import KeptState
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import (
    MIN_8BIT_ELEMENTS,
    QUANTIZATION_BLOCK_ELEMENTS,
    UPDATE_PIECE_ELEMENTS,
    update_scratch_bytes,
)
from optimizer.plan.weights import WeightsPlan, rounding_scratch_bytes
from optimizer.profile.trained import TensorSize

TABLES_BYTES = 2 * 256 * 4
"""Bytes of the tables of 8-bit state, once: made with the optimizer, not by its first step."""
STEP_COUNTER_BYTES = 4
"""torch's fused AdamW counts steps in one fp32 scalar per tensor."""
_FP32_BYTES = 4
_LION_PIECE_ELEMENTS = 1 << 20
"""Elements that Lion updates at once (``runtime/updates/update_rule.py``)."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Moments of one optimizer, which a tensor gets in its first update and keeps."""

    bits: int
    kept: KeptState
    factored: tuple[tuple[int, int, int], ...] = ()
    """Factored state by a tensor's elements: the numbers it keeps and those that its update holds. Where shapes of as
    many elements differ, those of the larger."""

    def num_bytes(self, num_elements: int) -> int:
        """Bytes on the device; with 32 bits a count of steps, too."""
        if self.kept.declared.is_factored:
            return _FP32_BYTES * self._by_elements[num_elements][0] + self.counter_bytes
        if self.bits == 32 or num_elements < MIN_8BIT_ELEMENTS:
            return self.kept.num_moments * _FP32_BYTES * num_elements + self.counter_bytes
        return self.kept.num_moments * (num_elements + _FP32_BYTES * -(-num_elements // QUANTIZATION_BLOCK_ELEMENTS))

    @property
    def counter_bytes(self) -> int:
        """Bytes of each tensor's step count, where the optimizer counts its steps; bitsandbytes does it outside torch."""
        return STEP_COUNTER_BYTES if self.kept.counts_steps and self.bits == 32 else 0

    @cached_property
    def _by_elements(self) -> dict[int, tuple[int, int]]:
        return {num_elements: (num_kept, num_held) for num_elements, num_kept, num_held in self.factored}

    def copy_of(self, num_elements: int) -> int:
        """Bytes of fp32 numbers that an update by plain kernels holds while it runs; fused ones hold none."""
        if self.kept.declared.is_factored:
            return _FP32_BYTES * self._by_elements[num_elements][1]
        return _FP32_BYTES * min(num_elements, _LION_PIECE_ELEMENTS) if self.kept.optimizer == "lion" else 0

    def scratch_of(self, num_elements: int, *, device_kind: str) -> int:
        """Bytes that an update of one tensor holds on the device while it runs; torch's own kernels hold none."""
        if self.bits == 32 or device_kind != "cpu":
            return 0
        if num_elements < MIN_8BIT_ELEMENTS:
            return update_scratch_bytes(num_elements, bits=32)
        return update_scratch_bytes(min(num_elements, UPDATE_PIECE_ELEMENTS), bits=8)


def moments_of(sizes: Sequence[TensorSize], *, bits: int, kept: KeptState) -> Moments:
    """The moments that these tensors get. bits: of the plan's state. kept: of the workload's optimizer."""
    factored: dict[int, tuple[int, int]] = {}
    for size in sizes if kept.declared.is_factored else ():
        known = factored.get(size.num_elements, (0, 0))
        num_kept, num_held = _factor(size)
        factored[size.num_elements] = (max(num_kept, known[0]), max(num_held, known[1]))
    rows = tuple((num_elements, *numbers) for num_elements, numbers in sorted(factored.items()))
    return Moments(bits=bits, kept=kept, factored=rows)


def _factor(size: TensorSize) -> tuple[int, int]:
    """Numbers that Adafactor keeps of a tensor, and those that its update holds (``runtime/updates/adafactor.py``)."""
    if not size.is_matrix:
        return size.num_elements, 2 * size.num_elements + 1
    num_sums = size.num_elements // size.columns + size.num_elements // size.rows
    num_matrices = size.num_elements // (size.rows * size.columns)
    return num_sums, size.num_elements + num_sums + num_matrices


UpdateChange = tuple[Literal["copies", "scratch", "gradients", "optimizer_state"], int]
"""Bytes that come or go: of fp32 copies, of what a kernel holds, of the gradient, of the state."""


@dataclass(frozen=True, kw_only=True)
class TensorUpdate:
    """Memory that the update of one tensor makes and drops on the device, where its state is there."""

    moments: Moments
    is_first: bool
    """True where the update makes the moments."""
    drops_gradient: bool
    """True where the gradient is gone with the update."""
    gradient_bytes: int
    """Bytes of each element's gradient."""
    widens: bool
    rounds: bool
    """True where the new weight is rounded to bf16 at random, from an fp32 copy that is made for the update."""
    device_kind: str

    def list_changes(self, num_elements: int) -> Iterator[UpdateChange]:
        """List the changes in order. The fp32 copy of a gradient comes before the gradient goes."""
        gradient_bytes, copy_bytes = self.gradient_bytes * num_elements, _FP32_BYTES * num_elements
        if self.widens:
            yield "copies", copy_bytes
            yield "gradients", -gradient_bytes
        if self.rounds:
            yield "copies", copy_bytes
        if self.is_first:
            yield "optimizer_state", self.moments.num_bytes(num_elements)
        scratch_bytes = self.moments.scratch_of(num_elements, device_kind=self.device_kind)
        if scratch_bytes:
            yield "scratch", scratch_bytes
            yield "scratch", -scratch_bytes
        held_bytes = self.moments.copy_of(num_elements)
        if held_bytes:
            yield "copies", held_bytes
            yield "copies", -held_bytes
        if self.widens:
            yield "copies", -copy_bytes
            yield from self._list_rounding(num_elements) if self.rounds else ()
        elif self.drops_gradient:
            yield "gradients", -gradient_bytes

    def _list_rounding(self, num_elements: int) -> Iterator[UpdateChange]:
        noise_bytes = rounding_scratch_bytes(num_elements)
        yield "copies", noise_bytes
        yield "copies", -noise_bytes
        yield "copies", -_FP32_BYTES * num_elements


def tensor_update(
    gradients: GradientsPlan, weights: WeightsPlan, moments: Moments, *, is_first: bool, device_kind: str
) -> TensorUpdate:
    """The update of a plan whose state, or this part of it, is on the device."""
    return TensorUpdate(
        moments=moments,
        is_first=is_first,
        drops_gradient=gradients.choice != "keep",
        gradient_bytes=weights.bytes_per_element,
        widens=weights.widens_updates,
        rounds=weights.master == "none",
        device_kind=device_kind,
    )
