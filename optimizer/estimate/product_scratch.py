"""What a product in bf16 holds on the CPU beside its operands and result, where oneDNN computes it (AVX-512). Torch-free.

The work is cut into pieces of at most 256 rows and 64 columns, and the depth into stretches of 512 or 1024. Each thread has
buffers of its own: a piece of the second matrix laid out anew, sums in fp32, and a piece of the first matrix where its columns
lie in memory one after another, or its rows so far apart that they meet in the cache. Sums of up to 16 pieces of columns then
wait for the next stretch of the depth.

How many rows and pieces of columns are worked on at once is what divides the work among the threads most evenly, as oneDNN
weighs it (brgemm_matmul_utils.cpp, AVX-512). Found with torch's profiler (2.13, oneDNN 3.12), to the byte over 5,800 drawn
products on one to sixteen threads. *Not modelled*: processors with tiles (AMX) or with instructions for fp16, which is torch's
own elsewhere.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_WORK: Final = 16**3
"""Up to so many multiplications torch does it by itself (Matmul.cpp, mkldnn)."""
_COLUMNS, _DEPTH_STEP = 64, 32
"""Of a piece, and what depths are filled up to."""
_MOST_ROWS, _LEAST_ROWS, _LEAST_SHARED_ROWS = 256, 32, 16
"""Of a piece; the last where there are fewer pieces of columns than threads."""
_MOST_WAITING = 16
"""Pieces of columns."""
_STRETCH, _LONG_STRETCH = 512, 1024
_DEEP, _MOST_DIVIDING = 2048, 4
"""From such a depth on, of a power of two, so many threads may divide it, each with sums of the whole result."""
_MANY_ROWS, _FAR_APART = 1024, 4096
"""Rows of such a length, of a power of two, meet in the cache; where there are as many, they are laid out anew."""
_PIECES_PER_THREAD = 3
"""With fewer, no thread may have one less than the others."""
_NUM_SCORES = 5
"""That are averaged."""
_FP32_BYTES, _BF16_BYTES = 4, 2
_GUARD_BYTES, _LAID_OUT_GUARD_BYTES, _THREADS_GUARD_BYTES = 384, 128, 640


class _Product(NamedTuple):
    num_products: int
    rows: int
    depth: int
    columns: int
    is_transposed: bool
    """The first matrix, whose columns then lie in memory one after another."""

    @property
    def num_column_pieces(self) -> int:
        return -(-self.columns // _COLUMNS)

    @property
    def is_laid_out(self) -> bool:
        """Whether the first matrix is."""
        meets = self.rows >= _MANY_ROWS and self.depth >= _FAR_APART and _is_power_of_two(self.depth)
        return self.is_transposed or meets

    @property
    def stretch(self) -> int:
        """Of the depth, worked on at once."""
        is_long = self.depth > _LONG_STRETCH and not self.is_transposed and self.rows > 1
        return min(self.depth, _LONG_STRETCH if is_long else _STRETCH)


class _Pieces(NamedTuple):
    rows: int
    num_waiting: int
    """Pieces of columns."""
    num_dividing: int
    """Threads that divide the depth."""


def hold_product(sides: Sequence[int], *, form: str, num_threads: int) -> int:
    """Bytes. sides: how many products, rows, columns of the first, columns of the second. form: as ``Op.form``."""
    count, rows, depth, columns = sides
    # A single column lies the same both ways: of one product it may be taken for either.
    ways = {form.startswith("t")} if depth > 1 else {False, count == 1}
    return max(_hold(_Product(count, rows, depth, columns, is_transposed), num_threads) for is_transposed in ways)


def hold_grouped_product(sides: Sequence[int], *, form: str, num_threads: int) -> int:
    """Bytes of one product after another, over as many rows each as a group has, which only the run tells: the most that any
    can hold. Backward's groups divide the depth instead.
    """
    _, rows, depth, columns = sides
    if form.startswith("t"):
        # A deeper one holds no more, but where threads may divide it.
        depths = {min(depth, _STRETCH + 1), _DEEP if depth >= _DEEP else depth}
        return max(_hold(_Product(1, rows, each, columns, is_transposed=True), num_threads) for each in depths)
    whole = _Product(1, rows, depth, columns, is_transposed=False)
    largest = whole._replace(rows=min(rows, _MANY_ROWS - 1))
    if largest.rows * depth * columns <= LEAST_WORK:
        return 0
    pieces = _Pieces(min(rows, _MOST_ROWS), num_waiting=1, num_dividing=1)
    return max(_hold(whole, num_threads), _buffers_of(largest, pieces, num_threads))


@lru_cache(maxsize=4096)
def _hold(product: _Product, num_threads: int) -> int:
    if product.num_products * product.rows * product.depth * product.columns <= LEAST_WORK:
        return 0
    if product.num_products == product.columns == 1:
        # A column is taken for a row.
        product = product._replace(rows=1, columns=product.rows)
    if product.rows == 1:
        product = product._replace(is_transposed=False)
    return _buffers_of(product, _weigh(product, num_threads), num_threads)


def _buffers_of(product: _Product, pieces: _Pieces, num_threads: int) -> int:
    stretch = product.stretch
    waits = product.depth > stretch
    filled = -(-stretch // _DEPTH_STEP) * _DEPTH_STEP
    num_sums = pieces.rows * min(product.columns, _COLUMNS) * (pieces.num_waiting if waits else 1)
    if waits and pieces.num_dividing > 1:
        num_sums = product.rows * product.columns
    each_bytes = _THREADS_GUARD_BYTES + filled * _COLUMNS * _BF16_BYTES + num_sums * _FP32_BYTES
    if not product.is_laid_out:
        return _GUARD_BYTES + num_threads * each_bytes
    # Nor may these rows meet in the cache.
    row_length = filled + (_DEPTH_STEP if filled >= _STRETCH and _is_power_of_two(filled) else 0)
    each_bytes += pieces.rows * row_length * _BF16_BYTES
    return _GUARD_BYTES + _LAID_OUT_GUARD_BYTES + num_threads * each_bytes


def _weigh(product: _Product, num_threads: int) -> _Pieces:
    """What divides the work most evenly: of equals the most columns that wait, then the most rows."""
    num_products, rows, depth, _, is_transposed = product
    num_columns = product.num_column_pieces
    is_little = num_threads > num_products * num_columns
    most_rows = min(rows, _MOST_ROWS)
    least_rows = min(rows, _LEAST_SHARED_ROWS if is_little else _LEAST_ROWS)
    most_waiting = min(num_columns, _MOST_WAITING) if product.is_laid_out else 1
    can_divide = is_little and num_products == 1 and is_transposed and depth >= _DEEP and _is_power_of_two(depth)
    most_dividing = min(num_threads, _MOST_DIVIDING) if can_divide else 1
    # Every choice of both, in the order in which equals are preferred.
    num_waiting = np.repeat(np.arange(most_waiting, 0, -1), most_rows - least_rows + 1)
    piece_rows = np.tile(np.arange(most_rows, least_rows - 1, -1), most_waiting)
    num_rows, num_waits = -(-rows // piece_rows), -(-num_columns // num_waiting)
    num_pieces = num_rows * num_waits * num_products
    unfilled = piece_rows * num_rows % rows / rows + (num_waits * num_waiting - num_columns) / num_columns
    best, found = 1.0, _Pieces(least_rows, num_waiting=1, num_dividing=1)
    for num_dividing in range(most_dividing, 0, -1):
        num_sharing = num_threads // num_dividing
        idle = (num_threads - num_sharing * num_dividing) / num_threads
        depth_unevenness = float(_unevenness(np.array(depth), num_dividing * product.stretch))
        scores = (_unevenness(num_pieces, num_sharing) + unfilled + idle + depth_unevenness) / _NUM_SCORES
        if most_dividing == 1:
            scores[(num_pieces < num_sharing * _PIECES_PER_THREAD) & (num_pieces % num_sharing != 0)] = np.inf
        # Rounded, so that equals are equal however they were summed up.
        chosen = int(np.argmin(np.round(scores, 9)))
        if scores[chosen] < best:
            best, found = float(scores[chosen]), _Pieces(int(piece_rows[chosen]), int(num_waiting[chosen]), num_dividing)
    return found


def _unevenness(work: NDArray[np.int64], share: int) -> NDArray[np.float64]:
    """How far some work is from whole shares: 0 where it divides."""
    over = work % share
    uneven: NDArray[np.float64] = np.where(work < share, share - over, np.minimum(share - over, over)) / share
    return uneven


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
