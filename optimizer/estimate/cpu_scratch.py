"""What the CPU device holds beside the tensors that the runtime's meter counts, and the peak with it. Torch-free.

Kernels hold scratch while they run (``profile/op_scratch.py``); attention squares of scores for each thread, in tiles;
convolutions what ``convolution_scratch.py`` says. A block
that will run forward again keeps the random numbers' state from its forward to the end of its backward. All of it is in
torch's own allocations, and not in what a budget on the CPU device is enforced by: it widens the interval above the peak.

Source of the tiles: ``cpu_flash_attention`` and its backward in torch's FlashAttentionKernel.cpp, without the packing that
some processors get for 16 bits.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optimizer.categories import Tier
from optimizer.estimate.convolution_scratch import Held, list_held
from optimizer.profile.convolution import Convolution
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
    """A moment inside a part with scratch: bytes above the part's start, and how many more for each thread. It comes only where
    there are so many threads.
    """

    num_bytes: int
    per_thread_bytes: int = 0
    min_threads: int = 1


def scratch_of(op: Op, shape: Shape, *, is_half: bool) -> tuple[Held, ...]:
    """Of one op, at one shape: empty where it holds nothing. is_half: what is computed in takes 16 bits."""
    if op.convolution:
        return list_held(Convolution(*(evaluate(size, shape) for size in op.convolution)))
    if not op.square and not any(op.scratch_bytes):
        return ()
    square = [evaluate(side, shape) for side in op.square]
    each = attention_bytes(square, is_backward="backward" in op.name, is_half=is_half) if square else 0
    return (Held(max(0, evaluate(op.scratch_bytes, shape)), each),)


def attention_bytes(square: Sequence[int], *, is_backward: bool, is_half: bool) -> int:
    """For each thread. square: the query's length, the keys' length, the width of a head."""
    query_length, keys_length, head_dim = square
    rows = min(query_length, next(tile for length, tile in _QUERY_TILES if query_length >= length))
    columns = min(keys_length, _KEYS_TILE)
    scores = rows * columns
    if is_backward:
        return 2 * scores * (_FP32_BYTES + _HALF_BYTES * is_half) + _FP32_BYTES * rows
    return _FP32_BYTES * (scores + 2 * rows + rows * head_dim) + _HALF_BYTES * scores * is_half


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
        found += (Point(level + held.num_bytes, held.per_thread_bytes, held.min_threads) for held in scratch[op])
    return tuple(_highest(found))


def _device_bytes(change: tuple[Tier, int, int]) -> int:
    tier, _, num_bytes = change
    return num_bytes if tier == "device" else 0


def _highest(points: Sequence[Point]) -> list[Point]:
    """Without those that another is above of, however many threads there are."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.per_thread_bytes, -point.num_bytes, point.min_threads)):
        if not any(other.num_bytes >= point.num_bytes and other.min_threads <= point.min_threads for other in kept):
            kept.append(point)
    return kept
