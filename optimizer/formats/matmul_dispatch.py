"""Which products in fp32 the runtime leaves to oneDNN on processors where that is quicker
(``runtime/layers/matmul_dispatch.py``). Torch-free.

By their size alone, so that an estimate knows it too. Each call of the library takes some 15 microseconds before it multiplies,
and a single row or column is a pass over the matrix, which no library makes quicker: break-even was measured between 1 and 3
million FLOPs (docs/decisions/0034).
"""

from typing import Final

LEAST_FLOPS: Final = 2_500_000
LEAST_FLOPS_PER_BYTE: Final = 0.6
"""A single row or column has half a FLOP for each byte of the matrix; two have nearly one."""


def uses_onednn(rows: int, depth: int, columns: int) -> bool:
    """Whichever way round the three are: a layer's product and both of its backward are made alike."""
    return 2 * rows * depth * columns >= LEAST_FLOPS and min(rows, depth, columns) > 1
