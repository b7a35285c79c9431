"""What the CPU device holds beside the tensors that the runtime's meter counts, and the peak with it. Torch-free.

Kernels hold scratch while they run (``profile/op_scratch.py``); attention squares of scores for each thread, in tiles. A block
that will run forward again keeps the random numbers' state from its forward to the end of its backward. All of it is in
torch's own allocations, and not in what a budget on the CPU device is enforced by: it widens the interval above the peak.

Source of the tiles: ``cpu_flash_attention`` and its backward in torch's FlashAttentionKernel.cpp, without the packing that
some processors get for 16 bits.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optimizer.categories import Tier
from optimizer.profile.profile import Op
from optimizer.profile.sizes import Shape, evaluate

RANDOM_STATE_BYTES = 5_056
"""``torch.get_rng_state()``: a Mersenne Twister of 624 words, and what belongs to it."""
_QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""From which length of the query on how many of its rows are taken at once."""
_KEYS_TILE = 512
_FP32_BYTES = 4
_HALF_BYTES = 2


class Point(NamedTuple):
    """A moment inside a part with scratch: bytes above the part's start, and how many more for each thread."""

    num_bytes: int
    per_thread_bytes: int = 0


class OpScratch(NamedTuple):
    """Of one op, at one shape."""

    num_bytes: int
    per_thread_bytes: int


def scratch_of(op: Op, shape: Shape, *, is_half: bool) -> OpScratch | None:
    """None where it holds nothing. is_half: what is computed in takes 16 bits."""
    if not op.square and not any(op.scratch_bytes):
        return None
    square = [evaluate(side, shape) for side in op.square]
    each = attention_bytes(square, is_backward="backward" in op.name, is_half=is_half) if square else 0
    return OpScratch(num_bytes=max(0, evaluate(op.scratch_bytes, shape)), per_thread_bytes=each)


def attention_bytes(square: Sequence[int], *, is_backward: bool, is_half: bool) -> int:
    """For each thread. square: the query's length, the keys' length, the width of a head."""
    query_length, keys_length, head_dim = square
    rows = min(query_length, next(tile for length, tile in _QUERY_TILES if query_length >= length))
    columns = min(keys_length, _KEYS_TILE)
    scores = rows * columns
    if is_backward:
        return 2 * scores * (_FP32_BYTES + _HALF_BYTES * is_half) + _FP32_BYTES * rows
    return _FP32_BYTES * (scores + 2 * rows + rows * head_dim) + _HALF_BYTES * scores * is_half


def list_points(changes: Sequence[tuple[tuple[Tier, int, int], int]], scratch: Mapping[int, OpScratch]) -> tuple[Point, ...]:
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
        held = scratch[op]
        found.append(Point(level + held.num_bytes, held.per_thread_bytes))
    return tuple(_highest(found))


def _device_bytes(change: tuple[Tier, int, int]) -> int:
    tier, _, num_bytes = change
    return num_bytes if tier == "device" else 0


def _highest(points: Sequence[Point]) -> list[Point]:
    """Without those that another is above of in both."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.per_thread_bytes, -point.num_bytes)):
        if not kept or point.num_bytes > kept[-1].num_bytes:
            kept.append(point)
    return kept
