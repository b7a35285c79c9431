"""Memory that a product holds on the CPU beside its operands and result, where oneDNN computes it (AVX-512). Torch-free.

The work is cut into pieces of at most 256 rows and 64 columns (512 rows of a small product in fp32), and the depth into stretches
of 512 or 1024. Each thread has buffers of its own:

- a piece of the second matrix laid out anew. In fp32 only where its columns lie in memory one after another, or its rows so far
  apart that they meet in the cache;
- a piece of the first matrix, where its columns lie one after another; in bf16 also where its rows meet in the cache;
- sums in fp32, where the result is not what is summed up: bf16, a result that is added to what is there, or a depth that
  threads divide. Of up to 16 pieces of columns they wait for the next stretch of the depth.

How many rows and pieces of columns are worked on at once is what divides the work among the threads most evenly, as oneDNN
weighs it (brgemm_matmul_utils.cpp, AVX-512). Found with torch's profiler (2.13, oneDNN 3.12), to the byte over 39,000 drawn
products on one to sixteen threads. *Not modelled*: processors with tiles (AMX) or with instructions for fp16, which is torch's
own elsewhere; a single row or column out of a wider matrix; ``bmm`` of one product, taken for ``mm``; ``alpha``, four bytes;
matrices of which a piece's rows span 2 GiB.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_WORK: Final = 16**3
"""Most multiplications that torch does by itself (Matmul.cpp, mkldnn)."""
_FP32_BYTES: Final = 4
_ELEMENT_BYTES: Final = {"fp32": _FP32_BYTES, "bf16": 2}
_COLUMNS, _CACHE_LINE_BYTES = 64, 64
"""Columns of a piece, and the bytes to whose multiples depths are filled up."""
_MOST_ROWS, _LEAST_ROWS, _LEAST_SHARED_ROWS = 256, 32, 16
"""Rows of a piece: the most, the least, and the least where there are fewer pieces of columns than threads."""
_MOST_WAITING = 16
"""Pieces of columns."""
_STRETCH, _LONG_STRETCH = 512, 1024
_DEEP, _MOST_DIVIDING = 2048, 4
"""Depth from which on so many threads may divide it, each with sums of the whole result; in bf16 if it is a power of
two."""
_MANY_ROWS, _FAR_APART = 1024, 4096
"""Rows of such a length, of a power of two, meet in the cache; where there are as many, they are laid out anew in bf16."""
_PIECES_PER_THREAD = 3
"""Pieces per thread; with fewer, no thread may have one less than the others."""
_NUM_SCORES = 5
"""Scores that are averaged."""
_GUARD_BYTES, _THREADS_GUARD_BYTES = 128, 640
"""Bytes beside each kind of buffer, of which each thread's list of pieces is one."""

# In fp32 alone.
_FAR_COLUMNS, _FEW_ROWS = 256, 40
"""Limits of laying out the second matrix: above so many columns, of a power of two, its rows meet; so few rows are not
worth laying them out for."""
_SMALL_COLUMNS, _SMALL_ROWS, _SMALL_DEPTH, _SMALL_FIRST = 14_528, 768, 128, 49_152
"""Limits of a product whose pieces may have twice the rows; the last counts the first matrix's numbers."""
_HUGE_DEPTH, _HUGE_SIDE, _STRETCHES_PER_THREAD = 20_000, 512, 5
"""Limits of dividing the depth: from such a depth on, of at most such a side, as many threads divide it as have more
stretches than that each. Of several products oneDNN 3.12 then returns wrong sums (its pull request 5352): they must not
be left to it."""
_HUGE_COLUMNS, _MANY_PIECES_PER_THREAD = 20_000, 10
"""Columns, and pieces per thread, from which on pieces have the most rows, if these fill them."""


class _Product(NamedTuple):
    num_products: int
    rows: int
    depth: int
    columns: int
    is_transposed: bool
    """The first matrix, whose columns then lie in memory one after another."""
    is_second_transposed: bool
    element_bytes: int
    is_added: bool

    @property
    def is_fp32(self) -> bool:
        return self.element_bytes == _FP32_BYTES

    @property
    def reads_columns(self) -> bool:
        """True where the first matrix is read by columns. A single row is taken for a transposed one, but never laid
        out.
        """
        return self.is_transposed or self.rows == 1

    @property
    def num_column_pieces(self) -> int:
        return -(-self.columns // _COLUMNS)

    @property
    def most_rows(self) -> int:
        """The most rows of a piece."""
        is_thin = (self.rows <= _SMALL_ROWS and self.depth <= _SMALL_DEPTH) or self.rows * self.depth <= _SMALL_FIRST
        is_small = self.is_fp32 and self.num_products == 1 and self.columns <= _SMALL_COLUMNS and is_thin
        return min(self.rows, _MOST_ROWS * (2 if is_small else 1))

    @property
    def is_laid_out(self) -> bool:
        """True where the first matrix is laid out anew."""
        meets = self.rows >= _MANY_ROWS and self.depth >= _FAR_APART and _is_power_of_two(self.depth)
        return self.is_transposed or (meets and not self.is_fp32)

    @property
    def stretch(self) -> int:
        """The stretch of the depth that is worked on at once."""
        is_long = self.depth > _LONG_STRETCH and not self.reads_columns
        return min(self.depth, _LONG_STRETCH if is_long else _STRETCH)

    def is_little(self, num_threads: int) -> bool:
        """True where there are fewer pieces of columns than threads."""
        return num_threads > self.num_products * self.num_column_pieces

    def is_second_laid_out(self, num_threads: int) -> bool:
        if self.is_second_transposed or not self.is_fp32:
            return True
        is_spared = self.is_little(num_threads) and self.rows <= _FEW_ROWS and not self.reads_columns
        return self.columns > _FAR_COLUMNS and _is_power_of_two(self.columns) and not is_spared


class _Pieces(NamedTuple):
    rows: int
    num_waiting: int
    """Pieces of columns."""
    num_dividing: int
    """Threads that divide the depth."""


def hold_product(sides: Sequence[int], *, form: str, dtype: str, num_threads: int, is_added: bool = False) -> int:
    """Bytes. sides: how many products, rows, columns of the first, columns of the second. form: as ``Op.form``.
    dtype: ``bf16`` or ``fp32``. is_added: to what is there already, as by ``addmm``.
    """
    product = _read_product(sides, form, dtype, is_added=is_added)
    return max(_hold(each, num_threads) for each in _list_ways(product))


def hold_grouped_product(sides: Sequence[int], *, form: str, dtype: str, num_threads: int) -> int:
    """Bytes of one product after another, over as many rows each as a group has, which are known only when it runs: the
    most that any can hold. Backward's groups divide the depth instead. *Not modelled*: a first matrix of one column
    that rows divide.
    """
    whole = _read_product(sides, form, dtype, is_added=False)
    if whole.rows * whole.depth * whole.columns <= LEAST_WORK:
        return 0
    if whole.is_transposed:
        candidates = [each for depth in _extreme_depths(whole) for each in _list_ways(whole._replace(depth=depth))]
        return max(_hold_any_pieces(each, num_threads) for each in candidates)
    # Where there is one column, it is the rows that threads share.
    extreme_rows = {1, _FEW_ROWS + 1, _HUGE_SIDE, _COLUMNS * (num_threads - 1), whole.rows}
    held = max(_hold_any_pieces(whole._replace(rows=rows), num_threads) for rows in extreme_rows if 0 < rows <= whole.rows)
    if whole.is_fp32:
        return held
    most_waiting = min(whole.num_column_pieces, _MOST_WAITING) if whole.is_laid_out else 1
    return max(held, _buffers_of(whole, _Pieces(min(whole.rows, _MOST_ROWS), most_waiting, num_dividing=1), num_threads))


def _read_product(sides: Sequence[int], form: str, dtype: str, *, is_added: bool) -> _Product:
    count, rows, depth, columns = sides
    return _Product(count, rows, depth, columns, form.startswith("t"), form.endswith("t"), _ELEMENT_BYTES[dtype], is_added)


def _list_ways(product: _Product) -> Sequence[_Product]:
    """List the ways in which a product may lie. A single column lies the same both ways: of one product it is taken for
    what the library saw first of that size, of several for one that is not transposed.
    """
    if product.depth > 1:
        return (product,)
    plain = product._replace(is_transposed=False)
    return (plain, product._replace(is_transposed=True)) if product.num_products == 1 else (plain,)


def _extreme_depths(product: _Product) -> set[int]:
    """A deeper one holds no more, but where threads may divide it; a shallower one may have pieces of more rows."""
    small = max(_SMALL_FIRST // product.rows, _SMALL_DEPTH if product.rows <= _SMALL_ROWS else 1)
    return {min(product.depth, depth) for depth in (1, small, _STRETCH + 1, _DEEP)}


def _hold_any_pieces(product: _Product, num_threads: int) -> int:
    """The most, whichever number of threads divides the depth: how evenly they do so hangs on what is left of it."""
    product = _lay(product)
    found = [pieces for _, pieces in _weigh_each(product, num_threads)]
    if product.is_fp32 and _list_dividing(product, num_threads) != (1,):
        found.append(_Pieces(product.most_rows, num_waiting=1, num_dividing=_MOST_DIVIDING))
    return max(_buffers_of(product, pieces, num_threads) for pieces in found)


@lru_cache(maxsize=4096)
def _hold(product: _Product, num_threads: int) -> int:
    if product.num_products * product.rows * product.depth * product.columns <= LEAST_WORK:
        return 0
    product = _lay(product)
    _, pieces = min(_weigh_each(product, num_threads), key=lambda scored: scored[0])
    return _buffers_of(product, pieces, num_threads)


def _lay(product: _Product) -> _Product:
    """The product as the library takes it: a single column, but of several products, for a row, the first matrix then
    for the second; and what is a row or column alone for one that is not transposed.
    """
    if product.num_products == product.columns == 1:
        is_turned = not product.is_transposed
        product = product._replace(rows=1, columns=product.rows, is_transposed=False, is_second_transposed=is_turned)
    is_transposed = product.is_transposed and product.rows > 1
    is_second_transposed = product.is_second_transposed and product.columns > 1 and product.depth > 1
    return product._replace(is_transposed=is_transposed, is_second_transposed=is_second_transposed)


def _buffers_of(product: _Product, pieces: _Pieces, num_threads: int) -> int:
    """Bytes of every thread's, with a guard for each kind."""
    step = _CACHE_LINE_BYTES // product.element_bytes
    filled = -(-product.stretch // step) * step
    kinds = [_THREADS_GUARD_BYTES]
    if product.is_second_laid_out(num_threads):
        kinds.append(filled * _COLUMNS * product.element_bytes)
    if product.is_laid_out:
        # Nor may these rows meet in the cache.
        row_length = filled + (step if filled >= _STRETCH and _is_power_of_two(filled) else 0)
        kinds.append(pieces.rows * row_length * product.element_bytes)
    if pieces.num_dividing > 1:
        kinds.append(product.rows * product.columns * _FP32_BYTES)
    elif product.is_added or not product.is_fp32:
        num_waiting = pieces.num_waiting if product.depth > product.stretch else 1
        kinds.append(pieces.rows * min(product.columns, _COLUMNS) * num_waiting * _FP32_BYTES)
    return _GUARD_BYTES * len(kinds) + num_threads * sum(kinds)


def _weigh_each(product: _Product, num_threads: int) -> Iterator[tuple[float, _Pieces]]:
    """Yield the pieces that divide the work most evenly, with their unevenness, for each number of threads that may
    divide the depth, from the most. Of equals the first, the most columns that wait, then the most rows.
    """
    dividing = _list_dividing(product, num_threads)
    num_columns = product.num_column_pieces
    most_rows, least_rows = product.most_rows, _least_rows(product, num_threads, is_divided=dividing[0] > 1)
    most_waiting = min(num_columns, _MOST_WAITING) if product.is_laid_out else 1
    # Every choice of both, in the order in which equals are preferred.
    num_waiting = np.repeat(np.arange(most_waiting, 0, -1), most_rows - least_rows + 1)
    piece_rows = np.tile(np.arange(most_rows, least_rows - 1, -1), most_waiting)
    num_rows, num_waits = -(-product.rows // piece_rows), -(-num_columns // num_waiting)
    num_pieces = num_rows * num_waits * product.num_products
    unfilled = piece_rows * num_rows % product.rows / product.rows + (num_waits * num_waiting - num_columns) / num_columns
    for num_dividing in dividing:
        num_sharing = num_threads // num_dividing
        idle = (num_threads - num_sharing * num_dividing) / num_threads
        depth_unevenness = float(_unevenness(np.array(product.depth), num_dividing * product.stretch))
        scores = (_unevenness(num_pieces, num_sharing) + unfilled + idle + depth_unevenness) / _NUM_SCORES
        if dividing[0] == 1:
            scores[(num_pieces < num_sharing * _PIECES_PER_THREAD) & (num_pieces % num_sharing != 0)] = np.inf
        # Rounded, so that equals are equal however they were summed up.
        chosen = int(np.argmin(np.round(scores, 9)))
        if np.isinf(scores[chosen]):
            yield 1.0, _Pieces(least_rows, num_waiting=1, num_dividing=num_dividing)
        else:
            yield round(float(scores[chosen]), 9), _Pieces(int(piece_rows[chosen]), int(num_waiting[chosen]), num_dividing)


def _least_rows(product: _Product, num_threads: int, *, is_divided: bool) -> int:
    """The fewest rows of a piece."""
    num_pieces = product.num_products * product.num_column_pieces * -(-product.rows // product.most_rows)
    is_wide = product.is_fp32 and product.columns >= _HUGE_COLUMNS and num_pieces > _MANY_PIECES_PER_THREAD * num_threads
    if is_wide and product.rows % product.most_rows == 0 and not is_divided:
        return product.most_rows
    return min(product.rows, _LEAST_SHARED_ROWS if product.is_little(num_threads) else _LEAST_ROWS)


def _list_dividing(product: _Product, num_threads: int) -> Sequence[int]:
    """The numbers of threads that may divide the depth, from the most."""
    if not product.is_little(num_threads):
        return (1,)
    if product.is_fp32 and product.depth >= _HUGE_DEPTH and max(product.rows, product.columns) <= _HUGE_SIDE:
        return (_count_dividing_huge(product, num_threads),)
    is_shared = product.is_fp32 or _is_power_of_two(product.depth)
    if product.num_products == 1 and product.reads_columns and product.depth >= _DEEP and is_shared:
        return range(min(num_threads, _MOST_DIVIDING), 0, -1)
    return (1,)


def _count_dividing_huge(product: _Product, num_threads: int) -> int:
    """Fewer threads share the pieces, until those that are left divide the depth; fewer do that, until each has enough of it."""
    num_pieces = product.num_products * product.num_column_pieces * -(-product.rows // product.most_rows)
    num_sharing = next(number for number in range(num_threads, 0, -1) if num_pieces % number == 0)
    while num_threads // num_sharing <= num_threads % num_sharing:
        num_sharing //= _least_factor(num_sharing)
    num_dividing = num_threads // num_sharing
    num_stretches = -(-product.depth // product.stretch)
    while num_dividing > 1 and num_stretches <= _STRETCHES_PER_THREAD * num_dividing:
        num_dividing //= _least_factor(num_dividing)
    return num_dividing


def _least_factor(number: int) -> int:
    """The least factor above one; of one, one."""
    return next((factor for factor in range(2, number) if number % factor == 0), number)


def _unevenness(work: NDArray[np.int64], share: int) -> NDArray[np.float64]:
    """The distance of some work from whole shares: 0 where it divides."""
    over = work % share
    uneven: NDArray[np.float64] = np.where(work < share, share - over, np.minimum(share - over, over)) / share
    return uneven


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
