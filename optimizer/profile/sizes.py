"""Sizes as polynomials in the micro-batch B and the sequence length S, fitted exactly from a few traces.

A size is bytes, a count or FLOPs: always a whole number, and a sum of whole multiples of six monomials. The fit is a
solution in exact fractions, not a regression; one more shape than there are unknowns verifies it.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

Terms = tuple[int, int, int, int, int, int]
"""Coefficients of 1, B, S, B*S, S*S, B*S*S."""

Shape = tuple[int, int]
"""Micro-batch size, sequence length."""

ZERO: Terms = (0, 0, 0, 0, 0, 0)


def monomials(shape: Shape) -> tuple[int, int, int, int, int, int]:
    """The six monomials' values at one shape."""
    batch, sequence = shape
    return (1, batch, sequence, batch * sequence, sequence**2, batch * sequence**2)


def evaluate(terms: Terms, shape: Shape) -> int:
    return sum(coefficient * value for coefficient, value in zip(terms, monomials(shape), strict=True))


def fit_terms(values: Mapping[Shape, int], *, verify_at: Shape) -> Terms | None:
    """Coefficients that give every value, the one at ``verify_at`` included; None where no such polynomial exists.

    The other shapes must be a grid: two micro-batch sizes (or one) by three sequence lengths. With one micro-batch size the
    terms in B are zero, so the result holds for that micro-batch only.
    """
    batches = sorted({batch for batch, _ in values if (batch, _) != verify_at})
    sequences = sorted({sequence for _, sequence in values if (_, sequence) != verify_at})
    rows = [_fit_quadratic(sequences, [values[batch, sequence] for sequence in sequences]) for batch in batches]
    if len(batches) == 1:
        constant, slope = rows[0], [Fraction(0)] * 3
    else:
        low, high = batches
        slope = [(upper - lower) / (high - low) for lower, upper in zip(rows[0], rows[1], strict=True)]
        constant = [lower - low * change for lower, change in zip(rows[0], slope, strict=True)]
    ordered = (constant[0], slope[0], constant[1], slope[1], constant[2], slope[2])
    if any(value.denominator != 1 for value in ordered):
        return None
    terms: Terms = tuple(int(value) for value in ordered)  # type: ignore[assignment]
    return terms if evaluate(terms, verify_at) == values[verify_at] else None


def _fit_quadratic(points: Sequence[int], values: Sequence[int]) -> list[Fraction]:
    """Newton's divided differences through three points, as coefficients of 1, S, S*S."""
    (a, b, c), (fa, fb, fc) = points, values
    first = Fraction(fb - fa, b - a)
    second = (Fraction(fc - fb, c - b) - first) / (c - a)
    return [fa - first * a + second * a * b, first - second * (a + b), second]
