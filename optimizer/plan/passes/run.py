"""Records the passes that a generation ran: their micro-batches, early stops included, and their time. Torch-free.

The plan alone does not show them: sequences that stop leave early, and an attempt that resumes after a crash runs only the rest.
So a run reports the passes that it ran, and calibration prices those (``estimate/generation/runs.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from optimizer.plan.passes.arrange import PassShape

MAX_TIMED: Final = 12
"""Most passes that a run reports; each is priced in some 10 ms."""


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """Passes of one shape."""

    micro_batches: PassShape
    """Shapes of the micro-batches; ``num_steps`` and ``leaving`` are those that ran."""
    count: int
    total_ms: float
    """Time of all of them, from their prompts' ids to their answers in the caller's hands."""


def sum_passes(ran: Sequence[tuple[PassShape, float]]) -> tuple[TimedPass, ...]:
    """Sum the time of passes by shape: at most ``MAX_TIMED`` shapes, spread over the run. ran: passes with their milliseconds, in
    the order in which they ran.
    """
    found: dict[PassShape, TimedPass] = {}
    for shape, ms in ran:
        known = found.get(shape, TimedPass(micro_batches=shape, count=0, total_ms=0.0))
        found[shape] = TimedPass(micro_batches=shape, count=known.count + 1, total_ms=known.total_ms + ms)
    timed = tuple(found.values())
    if len(timed) <= MAX_TIMED:
        return timed
    return tuple(timed[place * (len(timed) - 1) // (MAX_TIMED - 1)] for place in range(MAX_TIMED))
