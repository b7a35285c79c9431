"""The ranges of shapes over which a model's ops are the same, and the few shapes at which each is traced.

A micro-batch of one is a range of its own: sums over the batch fall away. Sequences longer than a sliding window are another,
because the mask is then written out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.errors import InvalidModel
from optimizer.profile.sizes import Shape

SEQUENCE_LOW = 8
"""Shortest sequence a workload may ask for."""
MICRO_BATCH_HIGH = 1 << 20
_STEP = 8
_NUM_SEQUENCES = 4
"""Three for a quadratic, one to verify."""


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """Where one set of ops holds, and where to trace it."""

    micro_batch_low: int
    micro_batch_high: int
    sequence_low: int
    sequence_high: int
    grid: tuple[Shape, ...]
    verify_at: Shape


def plan_ranges(*, max_sequence_length: int, sequence_limits: Sequence[int]) -> list[ShapeRange]:
    """sequence_limits: lengths up to and including which the ops do not change (sliding windows)."""
    ranges = []
    low = SEQUENCE_LOW
    for high in [*sorted({limit for limit in sequence_limits if limit < max_sequence_length}), max_sequence_length]:
        if high < low:
            continue
        lengths = _sample_lengths(low, high)
        ranges.append(_range((1,), 3, lengths, low=low, high=high))
        ranges.append(_range((2, 3), 5, lengths, low=low, high=high))
        low = high + 1
    return ranges


def _sample_lengths(low: int, high: int) -> list[int]:
    step = min(_STEP, (high - low) // (_NUM_SEQUENCES - 1))
    if step < 1:
        raise InvalidModel(
            f"the model cannot be traced: only {high - low + 1} sequence lengths, {low} to {high}, share the same operations; "
            f"{_NUM_SEQUENCES} are needed",
            field="max_position_embeddings",
            value=high,
            allowed=f"at least {low + _NUM_SEQUENCES - 1}",
        )
    return [low + step * index for index in range(_NUM_SEQUENCES)]


def _range(
    batches: tuple[int, ...], verify_batch: int, lengths: Sequence[int], *, low: int, high: int
) -> ShapeRange:
    return ShapeRange(
        micro_batch_low=batches[0],
        micro_batch_high=1 if len(batches) == 1 else MICRO_BATCH_HIGH,
        sequence_low=low,
        sequence_high=high,
        grid=tuple((batch, length) for batch in batches for length in lengths[:3]),
        verify_at=(1 if len(batches) == 1 else verify_batch, lengths[3]),
    )
