"""The limit that verdicts go by, as bytes of tensors: a budget or a card, less what a process holds beside them."""

from dataclasses import dataclass

from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Peaks, at their upper end and in bytes, up to which plans like this one fit, and up to which they may."""

    fits_bytes: int
    tight_bytes: int


def limits_of(found: Prediction | GenerationPrediction, *, budget_bytes: int) -> Limits:
    """The verdict's own rules (``optimizer.estimate.prediction.judge``), turned into peaks.

    A card holds more than tensors: its context, what the allocator rounds up and keeps. How much more is taken from this plan.
    """
    high, value, memory = found.device_peak_high_bytes, found.highest_peak_bytes, found.memory
    fits, tight = [budget_bytes], [budget_bytes + high - value]
    if memory is not None:
        fits.append(budget_bytes - (memory.allocated.high - high))
        tight.append(budget_bytes - (memory.allocated.value - high))
        if memory.total_bytes:
            fits.append(memory.total_bytes - (memory.process.high - high))
            tight.append(memory.total_bytes - (memory.process.value - memory.releasable_bytes - high))
    return Limits(fits_bytes=min(fits), tight_bytes=max(min(fits), min(tight)))
