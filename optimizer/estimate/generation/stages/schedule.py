"""Runs the schedule of a pass through the stages of a cut model: who works when, and who waits for whom. Pure and torch-free.

The runtime's own rules (``runtime/generation/stages``): a stage takes micro-batches in turn, step by step; hidden states are
handed over when the one has made them and the other has nothing else to do, and hold up both; a micro-batch's next step begins on
the first stage when its token has come from the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """Times of what crosses between stages, in milliseconds."""

    prefill_ms: tuple[float, ...]
    """Time for the hidden states of a whole prefill, by micro-batch."""
    decode_ms: tuple[float, ...]
    """Time for those of one token."""
    token_ms: float
    """From the last stage until the first has a new token."""


@dataclass(frozen=True, kw_only=True)
class RanPass:
    """A pass that was run through the stages."""

    prefill_ms: float
    """Until all micro-batches have their first token."""
    total_ms: float
    busy_ms: tuple[float, ...]
    """Time that each stage computes."""
    handing_ms: tuple[float, ...]
    """Time in which each stage's hidden states cross, or come to it."""


def run_schedule(times_ms: Sequence[Sequence[Times]], hand_over: HandOver) -> RanPass:
    """times_ms: by stage, by micro-batch, the time of each of its steps, the prefill first."""
    num_stages, num_waves = len(times_ms), len(times_ms[0])
    free = [0.0] * num_stages
    handing = [0.0] * num_stages
    token_there = [0.0] * num_waves
    rows = [[wave.tolist() for wave in stage] for stage in times_ms]
    num_steps = max(len(wave) for wave in rows[0])
    prefill_ms = 0.0
    for step in range(num_steps):
        crossing = hand_over.decode_ms if step else hand_over.prefill_ms
        for wave in range(num_waves):
            if step >= len(rows[0][wave]):
                continue
            end = max(free[0], token_there[wave]) + rows[0][wave][step]
            for stage in range(1, num_stages):
                there = max(end, free[stage]) + crossing[wave]
                handing[stage - 1] += crossing[wave]
                handing[stage] += crossing[wave]
                free[stage - 1] = there
                end = there + rows[stage][wave][step]
            free[-1] = end
            token_there[wave] = end + hand_over.token_ms
        if not step:
            prefill_ms = max(token_there)
    busy = tuple(float(sum(wave.sum() for wave in stage)) for stage in times_ms)
    return RanPass(prefill_ms=prefill_ms, total_ms=max(token_there), busy_ms=busy, handing_ms=tuple(handing))
