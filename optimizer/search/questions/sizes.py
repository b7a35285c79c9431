"""The sizes at which a search for the most that fits looks, and so those in whose ranges a profile must hold."""

from optimizer.goal import Objective
from optimizer.workload import TrainingWorkload

SEQUENCE_STEP = 128
"""Longest sequences are multiples of this, and of the model's own block of attention."""
MAX_SEQUENCE_LENGTH = 131_072


def sizes_looked_at(objective: Objective, profile_limit: int, workload: TrainingWorkload) -> list[tuple[int, int]]:
    """Micro-batches and sequence lengths in whose ranges a profile must hold for ``answer_goal``.

    profile_limit: the longest sequence that the model has positions for.
    """
    if objective == "largest_batch":
        return [(1, workload.sequence_length), (2, workload.sequence_length)]
    if objective == "longest_sequence":
        highest = min(profile_limit, MAX_SEQUENCE_LENGTH)
        lengths = [length for length in (2**power for power in range(7, 18)) if length < highest]
        total = workload.global_batch_size
        return [(size, length) for size in {1, min(2, total)} for length in [*lengths, highest]]
    return []
