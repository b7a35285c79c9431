"""What a product in bf16 holds on the CPU beside its operands and result, where oneDNN computes it (AVX-512). Torch-free.

The second matrix is laid out in columns of 64 and groups of 32 rows, as much of it as is worked on at once; sums are kept in
fp32 for as many rows; the first matrix is laid out too where its columns lie in memory one after another, and sums of all
columns then wait for the next piece of the depth. Each thread has buffers of its own.

Found with torch's profiler (2.13, oneDNN 3) on a processor with AVX-512's instructions for bf16; fp16 is torch's own there. Of
one thread it is exact. Several divide rows, columns or the depth by a weighing that is not repeated here: what is said of them
is the most that they can hold. *Not modelled*: processors with tiles (AMX) or with instructions for fp16.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from optimizer.estimate.convolution_scratch import Held

LEAST_WORK: Final = 16**3
"""Up to so many multiplications torch does it by itself (Matmul.cpp, mkldnn)."""
_STRIP, _DEPTH = 64, 32
"""Columns, and rows of the second matrix, that are padded to."""
_LEAST_ROWS, _MOST_ROWS = 32, 256
"""Of the first matrix, worked on at once where there are more than the most."""
_DEPTHS: Final = ((1024, 1024), (512, 512))
"""Above so many rows of the second matrix, how many are worked on at once; of a single row the second alone."""
_TRANSPOSED_DEPTH, _SKIPPED = 512, 32
"""Of a transposed matrix so many columns are laid out at once; rows of so many lie apart, not to meet in the cache."""
_MOST_STRIPS = 16
"""Of which sums can wait."""
_FP32_BYTES, _BF16_BYTES = 4, 2
_GUARD_BYTES, _THREADS_GUARD_BYTES, _TRANSPOSED_GUARD_BYTES = 384, 640, 128
_MANY_ROWS = 2048
"""Of the second matrix: threads, two and more for each strip, can share these where the first is transposed, each with sums of
the whole result."""
_SHARED_ROWS, _LEAST_SHARE = 64, 16
"""Threads divide so many, and more; each has at least as many as the second says."""


def hold_product(sides: Sequence[int], *, form: str) -> tuple[Held, ...]:
    """Any of which can be the highest. sides: how many products, rows, columns of the first, columns of the second. form: as
    ``Op.form``. Empty: torch's own.
    """
    count, rows, depth, columns = sides
    if count * rows * depth * columns <= LEAST_WORK:
        return ()
    # A single row lies the same both ways, and so does a single column: of one product it can be taken for transposed.
    is_transposed = rows > 1 and (count == 1 if depth == 1 else form.startswith("t"))
    if count == columns == 1:
        # A column is taken for a row.
        rows, columns, is_transposed = columns, rows, False
    if not is_transposed:
        at_once = next((taken for above, taken in _DEPTHS[rows == 1 :] if depth > above), _padded(depth))
        one_row_bytes = min(columns, _STRIP) * _FP32_BYTES
        second_bytes = at_once * _STRIP * _BF16_BYTES
        is_one_piece = count == 1 and rows <= _MOST_ROWS and columns <= _STRIP
        return tuple(_hold(_GUARD_BYTES, second_bytes, (one_row_bytes, one_row_bytes), rows=rows, is_shared=is_one_piece))
    at_once = min(_padded(depth), _TRANSPOSED_DEPTH)
    laid_out_bytes = (at_once + (_SKIPPED if at_once == _TRANSPOSED_DEPTH else 0)) * _BF16_BYTES
    num_sums = _num_waiting_sums(columns) if depth > _TRANSPOSED_DEPTH else [min(columns, _STRIP)] * 2
    row_bytes = [laid_out_bytes + each * _FP32_BYTES for each in num_sums]
    guard_bytes, second_bytes = _GUARD_BYTES + _TRANSPOSED_GUARD_BYTES, at_once * _STRIP * _BF16_BYTES
    can_share_depth = count == 1 and depth >= _MANY_ROWS
    is_one_piece = count == 1 and rows <= _MOST_ROWS and columns <= _STRIP and not can_share_depth
    found = [*_hold(guard_bytes, second_bytes, row_bytes, rows=rows, is_shared=is_one_piece)]
    if can_share_depth:
        with_sums_bytes = _rows_at_once(rows) * laid_out_bytes + rows * columns * _FP32_BYTES
        found.append(_held(guard_bytes, 0, second_bytes + with_sums_bytes, min_threads=2 * -(-columns // _STRIP)))
    return tuple(found)


def hold_grouped_product(rows: int, depth: int, columns: int, *, form: str) -> Iterator[Held]:
    """One product after another, over as many rows each as a group has, which only the run tells: what the highest of them can
    hold. Backward's groups divide the depth instead, and nothing is higher than the one that has all of it.
    """
    most_rows = {rows, min(rows, _MOST_ROWS), min(rows, _SHARED_ROWS - 1)}
    for num_rows in sorted(most_rows):
        yield from hold_product((1, num_rows, depth, columns), form=form)


def hold_tile_products(queries: int, keys: int, head_dim: int) -> Iterator[Held]:
    """Of attention's backward with one tile: either of the two products that can be the largest, and the number that it is
    scaled by.
    """
    weights_gradient = hold_product((1, keys, queries, head_dim), form="tn")
    queries_gradient = hold_product((1, queries, keys, head_dim), form="nn")
    return (held._replace(num_bytes=held.num_bytes + _FP32_BYTES) for held in (*weights_gradient, *queries_gradient))


def _hold(guard_bytes: int, second_bytes: int, row_bytes: Sequence[int], *, rows: int, is_shared: bool) -> Iterator[Held]:
    """is_shared: threads divide the rows. row_bytes: of a row of the first matrix and of the result, on one thread, and at most
    on more.
    """
    alone_bytes, most_bytes = row_bytes
    stretch_bytes = _rows_at_once(rows) * alone_bytes
    if not is_shared or rows < _SHARED_ROWS:
        yield _held(guard_bytes, 0, second_bytes + stretch_bytes)
        # Whatever the pieces are then.
        yield _held(guard_bytes, 0, second_bytes + min(rows, _MOST_ROWS) * most_bytes, min_threads=2)
        return
    yield _held(guard_bytes, stretch_bytes, second_bytes)
    # Rows do not always divide by threads.
    yield _held(guard_bytes, stretch_bytes, second_bytes + alone_bytes, min_threads=2)
    yield _held(guard_bytes, 0, second_bytes + _LEAST_SHARE * alone_bytes, min_threads=2)


def _held(guard_bytes: int, num_bytes: int, per_thread_bytes: int, *, min_threads: int = 1) -> Held:
    return Held(guard_bytes + num_bytes, _THREADS_GUARD_BYTES + per_thread_bytes, min_threads, is_packed=True)


def _num_waiting_sums(columns: int) -> tuple[int, int]:
    """Of a row, kept at once: on one thread, where as many strips wait each time, and at most on more."""
    if columns <= _STRIP:
        return columns, columns
    num_strips = -(-columns // _STRIP)
    most = min(num_strips, _MOST_STRIPS)
    return max(each for each in range(1, most + 1) if num_strips % each == 0) * _STRIP, most * _STRIP


def _rows_at_once(rows: int) -> int:
    """As many as fill their pieces best, the most of those."""
    if rows <= _MOST_ROWS:
        return rows
    fewest, most = -(-rows // _MOST_ROWS), rows // _LEAST_ROWS
    pieces = min(range(fewest, most + 1), key=lambda num_pieces: -(-rows // num_pieces) * num_pieces)
    return -(-rows // pieces)


def _padded(depth: int) -> int:
    return -(-depth // _DEPTH) * _DEPTH
