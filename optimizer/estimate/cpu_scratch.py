"""What the CPU device holds beside the tensors that the runtime's meter counts, and the peak with it. Torch-free.

Kernels hold scratch while they run (``profile/op_scratch.py``); attention squares of scores for each thread, in tiles;
convolutions what ``convolution_scratch.py`` says, products in bf16 what ``product_scratch.py`` says. A block
that will run forward again keeps the random numbers' state from its forward to the end of its backward. All of it is in
torch's own allocations, and not in what a budget on the CPU device is enforced by: it widens the interval above the peak.

Source of the tiles: ``cpu_flash_attention`` and its backward in torch's FlashAttentionKernel.cpp, without the packing that
some processors get for fp16.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optimizer.categories import Tier
from optimizer.estimate.convolution_scratch import Held, list_held
from optimizer.estimate.experts import GROUPED_PRODUCT
from optimizer.estimate.product_scratch import hold_grouped_product, hold_product, hold_tile_products
from optimizer.profile.convolution import Convolution
from optimizer.profile.profile import Op
from optimizer.profile.sizes import Shape, evaluate
from optimizer.time_kinds import base_name

RANDOM_STATE_BYTES = 5_056
"""``torch.get_rng_state()``: a Mersenne Twister of 624 words, and what belongs to it."""
_QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""From which length of the query on how many of its rows are taken at once."""
_KEYS_TILE = 512
_FP32_BYTES = 4
_HALF_BYTES = 2


class Point(NamedTuple):
    """A moment inside a part with scratch: bytes above the part's start, and how many more for each thread. It comes only where
    there are so many threads, and as ``Held.is_packed`` says.
    """

    num_bytes: int
    per_thread_bytes: int = 0
    min_threads: int = 1
    is_packed: bool = False


def scratch_of(op: Op, shape: Shape, *, is_half: bool) -> tuple[Held, ...]:
    """Of one op, at one shape: empty where it holds nothing. is_half: what is computed in takes 16 bits."""
    if op.convolution:
        return list_held(Convolution(*(evaluate(size, shape) for size in op.convolution)))
    num_bytes = max(0, evaluate(op.scratch_bytes, shape))
    if not op.sides:
        return (Held(num_bytes),) if num_bytes else ()
    sides = [evaluate(side, shape) for side in op.sides]
    if base_name(op.name) == GROUPED_PRODUCT:
        return tuple(hold_grouped_product(*sides[1:], form=op.form))
    if op.kind == "matmul":
        return hold_product(sides, form=op.form)
    is_backward = "backward" in op.name
    tiles = Held(num_bytes, attention_bytes(sides, is_backward=is_backward, is_half=is_half))
    products = hold_tile_products(*_tile(sides)) if is_backward and op.dtype == "bf16" else ()
    with_products = (
        held._replace(num_bytes=num_bytes + held.num_bytes, per_thread_bytes=tiles.per_thread_bytes + held.per_thread_bytes)
        for held in products
    )
    return tiles, *with_products


def attention_bytes(sides: Sequence[int], *, is_backward: bool, is_half: bool) -> int:
    """For each thread. sides: the query's length, the keys' length, the width of a head."""
    rows, columns, head_dim = _tile(sides)
    scores = rows * columns
    if is_backward:
        return 2 * scores * (_FP32_BYTES + _HALF_BYTES * is_half) + _FP32_BYTES * rows
    return _FP32_BYTES * (scores + 2 * rows + rows * head_dim) + _HALF_BYTES * scores * is_half


def _tile(sides: Sequence[int]) -> tuple[int, int, int]:
    """Queries and keys that are taken at once, and the width of a head."""
    query_length, keys_length, head_dim = sides
    rows = min(query_length, next(tile for length, tile in _QUERY_TILES if query_length >= length))
    return rows, min(keys_length, _KEYS_TILE), head_dim


def list_points(changes: Sequence[tuple[tuple[Tier, int, int], int]], scratch: Mapping[int, Sequence[Held]]) -> tuple[Point, ...]:
    """Those of a part that can be its highest for some number of threads.

    changes: in order, each with the number of its op; what comes with an op is there while it runs, what goes leaves after.
    """
    found: list[Point] = []
    level, index = 0, 0
    for op in sorted(scratch):
        while index < len(changes) and changes[index][1] < op:
            level += _device_bytes(changes[index][0])
            index += 1
        while index < len(changes) and changes[index][1] == op and _device_bytes(changes[index][0]) >= 0:
            level += _device_bytes(changes[index][0])
            index += 1
        found += (Point(*held)._replace(num_bytes=level + held.num_bytes) for held in scratch[op])
    return tuple(_highest(found))


def _device_bytes(change: tuple[Tier, int, int]) -> int:
    tier, _, num_bytes = change
    return num_bytes if tier == "device" else 0


def _highest(points: Sequence[Point]) -> list[Point]:
    """Without those that another is above of, whatever the processor."""
    kept: list[Point] = []
    by_height = sorted(points, key=lambda each: (-each.per_thread_bytes, -each.num_bytes, each.min_threads, each.is_packed))
    for point in by_height:
        if not any(_is_above(other, point) for other in kept):
            kept.append(point)
    return kept


def _is_above(other: Point, point: Point) -> bool:
    """Wherever the point comes; of those with as much for each thread, or more."""
    comes_too = other.min_threads <= point.min_threads and other.is_packed <= point.is_packed
    return comes_too and other.num_bytes >= point.num_bytes
