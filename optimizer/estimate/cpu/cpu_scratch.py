"""Memory that the CPU device holds beside the tensors that the runtime's meter counts, and the peak with it. Torch-free.

Kernels hold scratch while they run (``profile/meta_ops/op_scratch.py``); attention squares of scores for each thread, in tiles;
convolutions what ``convolution_scratch.py`` says, products that a library makes what ``matmul_scratch.py`` says. A block
that will run forward again keeps the random numbers' state from its forward to the end of its backward. All of it is in
torch's own allocations, and not in what a budget on the CPU device is enforced by: it widens the interval above the peak.

Source of the tiles: ``cpu_flash_attention`` and its backward in torch's FlashAttentionKernel.cpp, without the packing that
some processors get for fp16.
"""

from collections.abc import Sequence
from itertools import product

from optimizer.estimate.cpu.convolution_scratch import hold_convolution
from optimizer.estimate.cpu.matmul_scratch import hold_grouped_product, hold_product
from optimizer.formats.matmul_dispatch import uses_onednn
from optimizer.formats.op_costs import ADDING, GROUPED_PRODUCT, base_name
from optimizer.hardware.machine import Processor
from optimizer.profile.meta_ops.convolution import Convolution
from optimizer.profile.ops import Op
from optimizer.profile.sizes import Shape, evaluate

RANDOM_STATE_BYTES = 5_056
"""``torch.get_rng_state()``: a Mersenne Twister of 624 words, and what belongs to it."""
_QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""Lengths of the query from which on so many of its rows are taken at once."""
_KEYS_TILE = 512
_FP32_BYTES = 4
_HALF_BYTES = 2


def scratch_of(op: Op, shape: Shape, *, is_half: bool, processor: Processor) -> int:
    """Bytes that one op holds at one shape. is_half: what is computed in takes 16 bits."""
    num_threads = processor.num_threads
    if op.convolution:
        convolution = Convolution(*(evaluate(size, shape) for size in op.convolution))
        return hold_convolution(convolution, num_threads=processor.num_threads, packs_bf16=processor.packs_bf16)
    num_bytes = max(0, evaluate(op.scratch_bytes, shape))
    if not op.sides:
        return num_bytes
    sides = [evaluate(side, shape) for side in op.sides]
    packs_bf16 = op.dtype == "bf16" and processor.packs_bf16
    if op.kind == "matmul":
        name = base_name(op.name)
        if name != GROUPED_PRODUCT:
            return made_product_bytes(sides, op.form, dtype=op.dtype, is_added=name.rstrip("_") in ADDING, processor=processor)
        return hold_grouped_product(sides, form=op.form, dtype=op.dtype, num_threads=num_threads) if packs_bf16 else 0
    is_backward = "backward" in op.name
    each_bytes = attention_bytes(sides, is_backward=is_backward, is_half=is_half)
    if is_backward and packs_bf16:
        each_bytes += hold_tile_products(sides, num_threads=num_threads)
    return num_bytes + num_threads * each_bytes


def made_product_bytes(sides: Sequence[int], form: str, *, dtype: str, is_added: bool, processor: Processor) -> int:
    """Held while the runtime multiplies, by whichever library makes such a product here. sides, form: as of ``hold_product``."""
    is_packed = processor.packs_fp32 and uses_onednn(*sides[1:]) if dtype == "fp32" else dtype == "bf16" and processor.packs_bf16
    if not is_packed:
        return 0
    return hold_product(sides, form=form, dtype=dtype, num_threads=processor.num_threads, is_added=is_added)


def attention_bytes(sides: Sequence[int], *, is_backward: bool, is_half: bool) -> int:
    """Bytes of attention for each thread. sides: the query's length, the keys' length, the width of a head."""
    rows, columns, head_dim = _tile(sides)
    scores = rows * columns
    if is_backward:
        return 2 * scores * (_FP32_BYTES + _HALF_BYTES * is_half) + _FP32_BYTES * rows
    return _FP32_BYTES * (scores + 2 * rows + rows * head_dim) + _HALF_BYTES * scores * is_half


def hold_tile_products(sides: Sequence[int], *, num_threads: int) -> int:
    """Bytes that a thread holds of attention's backward in bf16 with one tile: the larger of its two products whose
    result is in bf16, and the number that it is scaled by. Each lays out as much as for all threads, which the library
    does not know to be at work.

    sides: as in ``attention_bytes``.
    """
    query_length, keys_length, head_dim = sides
    most_rows, most_columns, _ = _tile(sides)
    held_bytes = 0
    for rows, columns in product(_parts(query_length, most_rows), _parts(keys_length, most_columns)):
        for form, each in (("nn", (1, rows, columns, head_dim)), ("tn", (1, columns, rows, head_dim))):
            held_bytes = max(held_bytes, hold_product(each, form=form, dtype="bf16", num_threads=num_threads, is_added=True))
    return held_bytes + _FP32_BYTES if held_bytes else 0


def _parts(length: int, most: int) -> set[int]:
    """The lengths into which a length is cut by tiles: whole ones, and what is left."""
    return {most, length % most} - {0}


def _tile(sides: Sequence[int]) -> tuple[int, int, int]:
    """Queries and keys that are taken at once, and the width of a head."""
    query_length, keys_length, head_dim = sides
    rows = min(query_length, next(tile for length, tile in _QUERY_TILES if query_length >= length))
    return rows, min(keys_length, _KEYS_TILE), head_dim
