"""Cost of waking threads on the CPU device: threads that share an op look for the next one a moment, then sleep.
Torch-free.

An op that comes later than that after the last shared one takes longer by the same time whatever its size, since it is
divided before the others are awake. How much that is hangs on the machine, and is probed (``Rates.wake_s``): some
microseconds where cores idle lightly, 25 to 80 on a virtual machine whose host takes idle cores back.

Which ops are shared is torch's own rule, and its libraries', from sizes alone: element-wise ops from ``GRAIN_SIZE``
elements on (``ATen/TensorIterator.h``), row-wise softmax and norms whenever there is more than one row, all attention,
products but the smallest, in fp32 not those of one row.

What comes and goes one tensor at a time (weights that stream, gradients and state on the host) is priced by how many of the
tensors are large enough to be shared, and by the Python between two of them.

*Not modelled*: where in a part its views are dispatched (they are spread evenly), and what runs on a card, which has no
such threads.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.formats.op_costs import ALLOCATIONS, OpKind, base_name
from optimizer.hardware.rates import Rates
from optimizer.profile.time_kinds import TimeKind

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ASLEEP_S: Final = 40e-6
"""Time after which all are asleep and waking costs all it costs: they look for 20 us (``optimizer/base/threads.py``)."""
AWAKE_S: Final = 5e-6
"""Time for which nobody is asleep; between the two in proportion, for what a mean says of gaps that scatter."""
BESIDE_KERNELS: Final = 2.0
"""Factor by which Python's work between two ops takes longer than in the probe's tiny model, whose kernels leave it in
the caches."""
UNEVEN: Final = 0.09
"""Share of a shared op by which its threads end apart, for which the first waits already."""
GRAIN_SIZE: Final = 32_768
_INDEX_GRAIN_SIZE: Final = 3_000
_LEAST_FLOPS: Final = 4_096
_ONE_ROW_INTENSITY: Final = 0.6
"""FLOPs for each byte of a product in fp32 with a vector, which is read once."""
_ONE_ROW_NORM: Final = 2.5
"""Bytes read for each written by a norm of one row, whose weight and bias are as long as the row."""
_ROW_WISE: Final = ("softmax", "layer_norm", "group_norm", "batch_norm")
_OF_WHAT_IS_READ: Final = ("sum", "mean", "amax", "argmax", "var", "norm")


def runs_multithreaded(
    kind: OpKind, name: str, dtype: str, *, flops: Floats, read_bytes: Floats, written_bytes: Floats
) -> Flags:
    """True for each op that threads share, of one kind, name and dtype, by their sizes."""
    base = base_name(name)
    element_bytes = 2 if dtype in ("bf16", "fp16") else 4
    if kind == "attention" or base == "convolution":
        return np.ones(flops.shape, dtype=bool)
    if base in ALLOCATIONS:
        return np.zeros(flops.shape, dtype=bool)
    if kind == "matmul":
        is_large: Flags = flops >= _LEAST_FLOPS
        if element_bytes == 4 and base in ("mm", "addmm"):
            is_large &= flops > _ONE_ROW_INTENSITY * (read_bytes + written_bytes)
        return is_large
    if any(part in base for part in _ROW_WISE):
        return read_bytes < _ONE_ROW_NORM * written_bytes
    counted_bytes = np.maximum(read_bytes, written_bytes) if base in _OF_WHAT_IS_READ else written_bytes
    grain = _INDEX_GRAIN_SIZE if base == "index" else GRAIN_SIZE
    return counted_bytes >= grain * element_bytes


def thread_wakeup_s(shared: Flags, kernels_s: Floats, before_s: Floats, *, wake_s: float) -> float:
    """Time to wake threads for the ops of a part, in order, where a part like it came before.

    before_s: what one thread does before each of them: its dispatch, and Python, as between the kernels of a real model.
    """
    at = np.flatnonzero(shared)
    if not len(at):
        return 0.0
    alone_s = np.cumsum(before_s + np.where(shared, 0.0, kernels_s))
    since_s = np.diff(alone_s[at], prepend=alone_s[at[-1]] - alone_s[-1]) + UNEVEN * np.roll(kernels_s[at], 1)
    return float(_asleep(since_s).sum()) * wake_s


def wakeup_cost_s(num_ops: int, rates: Rates, *, after_s: float, kind: TimeKind = "hooks") -> float:
    """Time to wake threads for so many shared ops, each after so much Python as probed. kind: of time, which corrects it."""
    if not num_ops or not rates.wake_s:
        return 0.0
    factor = rates.time_factor(kind)
    return num_ops * float(_asleep(np.array(BESIDE_KERNELS * after_s))) * rates.wake_s * factor


def count_multithreaded(num_elements: Iterable[int]) -> int:
    """Number of tensors, each of so many elements, that threads share in a copy or an element-wise op."""
    return sum(number >= GRAIN_SIZE for number in num_elements)


def _asleep(since_s: Floats) -> Floats:
    """Share of those that sleep by so long after a shared op."""
    return np.clip((since_s - AWAKE_S) / (ASLEEP_S - AWAKE_S), 0.0, 1.0)
