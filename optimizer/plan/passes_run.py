"""What passes of a generation came to: their micro-batches as they ran, stops included, and their time. Torch-free.

What was planned is no measure for it: sequences that stop leave early, and an attempt that goes on after a crash does the rest
alone. So a run tells what it ran, and that is priced (``estimate/generation/runs.py``) where something is to be learnt from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from optimizer.plan.passes import PassShape

MAX_TIMED: Final = 12
"""Passes that a run tells of; each is priced in some 10 ms."""


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """Passes of one shape."""

    micro_batches: PassShape
    """``num_steps`` and ``leaving`` are what ran."""
    count: int
    total_ms: float
    """Of all of them, from their prompts' ids to their answers in the caller's hands."""


def sum_passes(ran: Sequence[tuple[PassShape, float]]) -> tuple[TimedPass, ...]:
    """Of passes with their milliseconds, in the order in which they ran: one for each shape, no more than ``MAX_TIMED`` of them,
    spread over the run.
    """
    found: dict[PassShape, TimedPass] = {}
    for shape, ms in ran:
        known = found.get(shape, TimedPass(micro_batches=shape, count=0, total_ms=0.0))
        found[shape] = TimedPass(micro_batches=shape, count=known.count + 1, total_ms=known.total_ms + ms)
    timed = tuple(found.values())
    if len(timed) <= MAX_TIMED:
        return timed
    return tuple(timed[place * (len(timed) - 1) // (MAX_TIMED - 1)] for place in range(MAX_TIMED))
