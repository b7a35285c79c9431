"""What a product in bf16 holds on the CPU beside its operands and result, where oneDNN computes it (AVX-512). Torch-free.

The second matrix is laid out in columns of 64 and groups of 32 rows, as much of it as is worked on at once; sums are kept in
fp32 for as many rows; the first matrix is laid out too where its columns lie in memory one after another. Each thread has
buffers of its own, of fewer rows where there is only one piece of the work and all share it.

Found with torch's profiler (2.13, oneDNN 3) on a processor with AVX-512's instructions for bf16, one to four threads; fp16 is
torch's own there. *Not modelled*: processors with tiles (AMX) or with instructions for fp16; where pieces do not divide by the
threads, less is held than is said here.
"""

from collections.abc import Sequence
from typing import Final

from optimizer.estimate.convolution_scratch import Held

LEAST_WORK: Final = 16**3
"""Up to so many multiplications torch does it by itself (Matmul.cpp, mkldnn)."""
_COLUMNS, _ROWS, _DEPTH = 64, 256, 32
_DEPTHS: Final = ((1024, 1024), (512, 512))
"""Above so many rows of the second matrix, how many are worked on at once."""
_LARGEST_TRANSPOSED, _SKIPPED = 512, 32
"""A transposed matrix of as many columns or more has rows apart, so that they do not meet in the cache."""
_MOST_COLUMNS = 2304
_FP32_BYTES, _BF16_BYTES = 4, 2
_GUARD_BYTES, _THREADS_GUARD_BYTES, _TRANSPOSED_GUARD_BYTES = 384, 640, 128
_MANY_ROWS = 2048
"""Of the second matrix: threads share these then where the first is transposed, and not the rows of the first."""
_FEW_ROWS = 64
"""So few that threads which share them have little less each."""


def hold_product(sides: Sequence[int], *, form: str) -> Held | None:
    """sides: how many products, rows, columns of the first, columns of the second. form: as ``Op.form``. None: torch's own."""
    count, rows, depth, columns = sides
    if count * rows * depth * columns <= LEAST_WORK or depth == 1:
        return None
    is_transposed = form.startswith("t")
    if count == columns == 1:
        # A column is taken for a row.
        rows, columns, is_transposed = columns, rows, False
    num_stretches = -(-rows // _ROWS)
    stretch = -(-rows // num_stretches)
    num_strips = -(-columns // _COLUMNS)
    depths = _DEPTHS[-1:] if is_transposed and num_strips == 1 else _DEPTHS
    at_once = next((taken for above, taken in depths if depth > above), _padded(depth))
    second_bytes = at_once * _COLUMNS * _BF16_BYTES
    row_bytes = min(columns, _COLUMNS) * _FP32_BYTES
    guard_bytes = _GUARD_BYTES
    if is_transposed:
        guard_bytes += _TRANSPOSED_GUARD_BYTES
        row_bytes += _transposed_columns(depth, is_read_again=num_strips > 1) * _BF16_BYTES
    is_one_piece = count * num_stretches * (1 if is_transposed else num_strips) == 1
    if is_one_piece and rows >= _FEW_ROWS and not (is_transposed and depth >= _MANY_ROWS):
        return Held(guard_bytes + stretch * row_bytes, _THREADS_GUARD_BYTES + second_bytes, is_packed=True)
    return Held(guard_bytes, _THREADS_GUARD_BYTES + second_bytes + stretch * row_bytes, is_packed=True)


def hold_tile_products(queries: int, keys: int, head_dim: int) -> list[Held]:
    """Of attention's backward with one tile: either of the two products that can be the largest, and the number that it is
    scaled by.
    """
    weights_gradient = hold_product((1, keys, queries, head_dim), form="tn")
    queries_gradient = hold_product((1, queries, keys, head_dim), form="nn")
    found = (held for held in (weights_gradient, queries_gradient) if held is not None)
    return [held._replace(num_bytes=held.num_bytes + _FP32_BYTES) for held in found]


def _transposed_columns(depth: int, *, is_read_again: bool) -> int:
    """Of the first matrix laid out: all where more than one strip of the second comes to it."""
    columns = _padded(depth if is_read_again else min(depth, _LARGEST_TRANSPOSED))
    return min(_MOST_COLUMNS, columns) + (_SKIPPED if columns >= _LARGEST_TRANSPOSED else 0)


def _padded(depth: int) -> int:
    return -(-depth // _DEPTH) * _DEPTH
