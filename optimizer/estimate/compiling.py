"""The price of compiled blocks: time to compile, once, and an interval of the step's time that is wider. Torch-free.

A compiled block's bytes are those of its own trace, and so is its work: products and attention at the rates of the same ops, each
fused kernel at those of element-wise ops for what it reads and writes. No machine has rates of fused kernels yet, so the interval
is wider. Time to compile one block, forward and backward, is from a table:

CPU     12 to 34 s, of which a third is torch's own work and the rest a C++ compiler's, measured on two busy cores
        (``docs/experiments.md``).
card    2.4 to 2.9 s for a forward by regional compilation (accelerate's documentation, models of 1 to 13 billion parameters),
        twice that again for a backward.
"""

from typing import Final

from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile

_SECONDS_BY_DEVICE: Final = {"cpu": 20.0, "cuda": 8.0}
"""Seconds to compile one kind of block."""
_MEMORY_WIDTHS: Final = {"cpu": 0.0, "cuda": 0.1}
TIME_WIDTH: Final = 1.25
"""Factor to either end of the interval of a step with compiled blocks."""


def estimate_compile_s(profile: Profile, plan: Plan, *, device_kind: str) -> float:
    """Time to compile each kind of block once, as if none was kept from an earlier run.

    Blocks whose tensors have the same sizes count as one kind.
    """
    if plan.kernels.blocks != "compiled":
        return 0.0
    return _SECONDS_BY_DEVICE[device_kind] * len({profile.tensors.by_block[kind] for kind in profile.tensors.block_kinds})


def widen_memory(plan: Plan, *, device_kind: str) -> float:
    """Share of the peak by which its interval is wider. On the CPU device none: the trace runs the code that a step runs. For a
    card other code is generated, whose kernels may fuse other ops, and no card has shown by how much its buffers differ.
    """
    return _MEMORY_WIDTHS[device_kind] if plan.kernels.blocks == "compiled" else 0.0


def widen_time(plan: Plan, interval: tuple[float, float]) -> tuple[float, float]:
    """The factors on a step's time, further apart where blocks run compiled."""
    if plan.kernels.blocks != "compiled":
        return interval
    low, high = interval
    return low / TIME_WIDTH, high * TIME_WIDTH
