"""Decides which matrix products in fp32 the runtime leaves to oneDNN on processors where that is quicker
(``runtime/layers/matmul_dispatch.py``). Torch-free.

Size alone decides, so that an estimate knows it too. Each call of the library takes some 15 microseconds before it multiplies,
and a single row or column is a pass over the matrix, which no library makes quicker: break-even was measured between 1 and 3
million FLOPs (docs/decisions/0034).
"""

from typing import Final

LEAST_FLOPS: Final = 2_500_000
LEAST_FLOPS_PER_BYTE: Final = 0.6
"""A single row or column has half a FLOP for each byte of the matrix; two have nearly one."""


def uses_onednn(rows: int, depth: int, columns: int) -> bool:
    """Return true if oneDNN computes the product. The order of the three sizes does not matter: a layer's forward product and
    both of its backward products go the same way.
    """
    return 2 * rows * depth * columns >= LEAST_FLOPS and min(rows, depth, columns) > 1
