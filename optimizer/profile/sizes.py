"""Sizes as polynomials in the micro-batch B and the sequence length S, fitted exactly from a few traces.

A size is bytes or FLOPs: always a whole number, and a sum of whole multiples of few of six monomials. So it is found,
not regressed:
the fewest monomials that give every traced value in exact arithmetic, with always one value more than there are unknowns.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

Terms = tuple[int, int, int, int, int, int]
"""Coefficients of 1, B, S, B*S, S*S, B*S*S."""

Shape = tuple[int, int]
"""Micro-batch size, sequence length."""

NUM_MONOMIALS = 6
NO_TERMS: Terms = (0, 0, 0, 0, 0, 0)
"""Terms of a size that is nothing at any shape."""
_WITHOUT_BATCH = (0, 2, 4)
"""Monomials without B: all that can be separated where every shape has the same micro-batch."""


def monomials(shape: Shape) -> tuple[int, int, int, int, int, int]:
    """The six monomials' values at one shape."""
    batch, sequence = shape
    return (1, batch, sequence, batch * sequence, sequence**2, batch * sequence**2)


def evaluate(terms: Terms, shape: Shape) -> int:
    return sum(coefficient * value for coefficient, value in zip(terms, monomials(shape), strict=True))


def fit_terms(values: Mapping[Shape, int]) -> Terms | None:
    """Coefficients that give every value, of the fewest monomials; None where fewer monomials than values cannot.

    Where all shapes have one micro-batch size the terms in B are zero: the result holds for that micro-batch only. Of a
    single shape it is a constant, which holds there alone.
    """
    return _fit(tuple(values), tuple(values.values()))


@lru_cache(maxsize=1 << 15)
def _fit(shapes: tuple[Shape, ...], sizes: tuple[int, ...]) -> Terms | None:
    """Remembered: a model has few sizes, and each comes many times."""
    values = dict(zip(shapes, sizes, strict=True))
    if len(shapes) == 1:
        return (sizes[0], 0, 0, 0, 0, 0)
    is_one_batch = len({batch for batch, _ in shapes}) == 1
    usable = _WITHOUT_BATCH if is_one_batch else range(NUM_MONOMIALS)
    if not any(sizes):
        return (0, 0, 0, 0, 0, 0)
    for num_terms in range(1, len(shapes)):
        for chosen in combinations(usable, num_terms):
            solution = _solve(chosen, shapes[:num_terms], values)
            if solution is None:
                continue
            coefficients = [0] * NUM_MONOMIALS
            for index, coefficient in zip(chosen, solution, strict=True):
                coefficients[index] = coefficient
            terms: Terms = tuple(coefficients)  # type: ignore[assignment]
            if all(evaluate(terms, shape) == value for shape, value in values.items()):
                return terms
    return None


def _solve(chosen: Sequence[int], shapes: Sequence[Shape], values: Mapping[Shape, int]) -> list[int] | None:
    """Gauss elimination in exact fractions; None where singular or not whole."""
    rows = [[*(Fraction(monomials(shape)[index]) for index in chosen), Fraction(values[shape])] for shape in shapes]
    size = len(rows)
    for column in range(size):
        pivot = next((row for row in range(column, size) if rows[row][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [entry / scale for entry in rows[column]]
        for row in range(size):
            if row != column and rows[row][column]:
                factor = rows[row][column]
                pairs = zip(rows[row], rows[column], strict=True)
                rows[row] = [entry - factor * other for entry, other in pairs]
    solution = [row[-1] for row in rows]
    return [int(value) for value in solution] if all(value.denominator == 1 for value in solution) else None
