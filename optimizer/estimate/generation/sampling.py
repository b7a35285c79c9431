"""Costs of sequences that draw their tokens (``runtime/generation/sampling.py``) instead of taking the likeliest.
Torch-free."""

import numpy as np

from optimizer.estimate.ops.op_times import seconds_by_bytes
from optimizer.estimate.tasks.parts import PartTime
from optimizer.hardware.curves import DRAW
from optimizer.hardware.rates import Rates

_BYTES_PER_TOKEN = 16
"""Two rows of scores in fp32, and their places as int64."""
_MOVED_BYTES_PER_TOKEN = 100
"""Read and written for one sequence: a copy, a division, a sort by passes over keys and places, a softmax, a running sum."""
_NUM_OPS = 16
"""Ops for one sequence."""


def draw_bytes(vocab_size: int) -> int:
    """Bytes of drawing beside the logits, whatever the batch: one sequence draws after the other."""
    return _BYTES_PER_TOKEN * vocab_size


def draw_time(vocab_size: int, *, num_sequences: int, rates: Rates) -> PartTime:
    """Time of one token of each sequence; an upper figure where only some draw. Unmeasured, it is priced from the bytes,
    as if a sort took no longer than they do.
    """
    curve = rates.op_curve(DRAW)
    if curve is not None:
        drawn_s = float(seconds_by_bytes(np.array([vocab_size], dtype=np.float64), curve)[0])
        return PartTime.spent(elementwise=num_sequences * drawn_s * rates.time_factor("elementwise") * 1000)
    dispatch_s = rates.op_overhead_s if rates.forward_dispatch_s is None else rates.forward_dispatch_s
    moved_bytes = _MOVED_BYTES_PER_TOKEN * vocab_size
    return PartTime.spent(
        elementwise=num_sequences * moved_bytes / rates.memory_bytes_per_s * 1000,
        dispatch=num_sequences * _NUM_OPS * dispatch_s * 1000,
    )
