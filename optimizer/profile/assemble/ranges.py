"""The ranges of shapes over which a model's ops are the same, and the few shapes at which each is traced.

A micro-batch of one is a range of its own: sums over the batch fall away. Sequences longer than a sliding window are another,
because the mask is then written out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

from optimizer.base.errors import InvalidModel
from optimizer.profile.sizes import Shape

SEQUENCE_LOW = 8
"""Shortest sequence a workload may ask for."""
MICRO_BATCH_HIGH = 1 << 20
_BATCHES = (13, 7, 11, 5)
"""Primes, as the lengths are, so that a size at the first shape is hardly the product of other dimensions by chance."""
_NUM_LENGTHS = 4
_LENGTHS = (128, 256, 512, 1_024)
_FAR = 521
"""A length well above those traced, whose masks are still computed for real."""
_FEW_FACTORS = 12
"""Enough to hold four primes."""
_SHORT_END = 256
"""Lengths are taken from so many above the range's lowest; masks that are computed for real stay small."""


class ShapesDiffer(InvalidModel):
    """Shapes that should differ in sizes alone have other operations, or a size that is no polynomial."""


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """A range of shapes in which one set of ops holds, and where to trace it."""

    micro_batch_low: int
    micro_batch_high: int
    sequence_low: int
    sequence_high: int
    shape: Shape
    more_shapes: tuple[Shape, ...]

    def covers(self, shape: Shape) -> bool:
        batch, sequence = shape
        return (
            self.micro_batch_low <= batch <= self.micro_batch_high
            and self.sequence_low <= sequence <= self.sequence_high
        )


def plan_ranges(
    *,
    max_sequence_length: int,
    sequence_limits: Sequence[int],
    multiple: int = 1,
    shortest: int = 1,
    lowest: int = SEQUENCE_LOW,
) -> list[ShapeRange]:
    """Plan the ranges. sequence_limits: lengths up to and including which the ops do not change (sliding windows).

    multiple, shortest: lengths are multiples of the first and at least the second (attention in blocks). lowest: that a workload
    may ask for.
    """
    ranges = []
    low = max(lowest, shortest)
    for high in [*sorted({limit for limit in sequence_limits if limit < max_sequence_length}), max_sequence_length]:
        if high < low:
            continue
        lengths = _sample_lengths(low, high) if multiple == 1 else _sample_multiples(low, high, multiple)
        ranges.append(_range((1,) * len(lengths), lengths, low=low, high=high))
        ranges.append(_range(_BATCHES, lengths, low=low, high=high))
        low = high + 1
    return ranges


def plan_length(length: int) -> list[ShapeRange]:
    """Ranges of one sequence length, in which only the micro-batch varies: for models whose ops depend on the length."""
    # A micro-batch of one is traced twice, as other ranges are traced at more than one shape.
    return [_range(batches, (length,) * len(batches), low=length, high=length) for batches in ((1, 1), _BATCHES)]


def lengths_without_question(max_sequence_length: int) -> list[int]:
    """Sequence lengths to trace one by one where nobody says which are wanted."""
    return [length for length in _LENGTHS if length <= max_sequence_length] or [max_sequence_length]


def witnesses_of(place: ShapeRange, asked: Sequence[int]) -> list[Shape]:
    """More shapes of a range, far from where it is traced. asked: lengths that somebody wants."""
    batch = place.more_shapes[-1][0]
    lengths = {place.sequence_low, min(place.sequence_high, max(_FAR, place.sequence_low)), *asked}
    # The longest first: what a model is written for, where a short sequence makes it another (BigBird).
    return [(batch, length) for length in sorted(lengths, reverse=True) if place.sequence_low <= length <= place.sequence_high]


def _sample_lengths(low: int, high: int) -> list[int]:
    """The largest primes of the range's short end; any lengths where it holds too few primes."""
    lengths = range(low, min(high, low + _SHORT_END) + 1)
    if len(lengths) < _NUM_LENGTHS:
        raise ShapesDiffer(
            f"the model cannot be traced: only {len(lengths)} sequence lengths, {low} to {high}, share the same "
            f"operations; {_NUM_LENGTHS} are needed",
            field="max_position_embeddings",
            value=high,
            allowed=f"at least {low + _NUM_LENGTHS - 1}",
        )
    primes = [length for length in lengths if all(length % divisor for divisor in range(2, isqrt(length) + 1))]
    # Of the first shape's batch and length a size must show which it is.
    is_enough = len(primes) >= _NUM_LENGTHS and max(primes) != _BATCHES[0]
    return sorted(primes if is_enough else lengths, reverse=True)[:_NUM_LENGTHS]


def _sample_multiples(low: int, high: int, multiple: int) -> list[int]:
    """Primes times the multiple where there is room, from the range's short end."""
    first, last = -(-low // multiple), high // multiple
    factors = range(first, min(last, first + max(_FEW_FACTORS, _SHORT_END // multiple)) + 1)
    if len(factors) < _NUM_LENGTHS:
        raise InvalidModel(
            f"the model cannot be traced: only {len(factors)} multiples of {multiple}, its attention's block, lie from {low} "
            f"to {high}; {_NUM_LENGTHS} are needed",
            field="max_position_embeddings",
            value=high,
            allowed=f"at least {multiple * (first + _NUM_LENGTHS - 1)}",
        )
    primes = [n for n in factors if n > 1 and all(n % divisor for divisor in range(2, isqrt(n) + 1))]
    chosen = primes if len(primes) >= _NUM_LENGTHS else factors
    return [factor * multiple for factor in sorted(chosen, reverse=True)[:_NUM_LENGTHS]]


def _range(batches: Sequence[int], lengths: Sequence[int], *, low: int, high: int) -> ShapeRange:
    shapes = tuple(zip(batches, lengths, strict=True))
    is_one = batches[0] == 1
    return ShapeRange(
        micro_batch_low=1 if is_one else 2,
        micro_batch_high=1 if is_one else MICRO_BATCH_HIGH,
        sequence_low=low,
        sequence_high=high,
        shape=shapes[0],
        more_shapes=shapes[1:],
    )
