"""The values that a search takes of decisions with many: counts of chunks, shares of the state, blocks that are fetched ahead."""

from typing import Final

from optimizer.plan.logits_and_loss import MAX_CHUNKS
from optimizer.search.problem import OuterPlan

TOKENS_PER_CHUNK: Final = (1024, 256, 64)
"""Rows of logits that exist at once, in the counts of chunks that are tried first: few enough to be small beside a model, and
few enough to be small at all."""
MAX_PREFETCH: Final = 3
FRACTION_STEPS: Final = {"shallow": 16, "deep": 64}
"""Shares of the state that leave the device are multiples of one over this. Few tensors make no finer shares."""
MAX_SHALLOW_BLOCKS: Final = 8
PREFETCHES: Final = (2, 1, 0)
"""Blocks fetched ahead that are tried first; larger numbers when a plan is polished."""


def chunk_counts(base: OuterPlan, *, tokens: int) -> tuple[int, ...]:
    """One, and those that leave TOKENS_PER_CHUNK tokens in a chunk. tokens: of a sequence."""
    total = base.micro_batch_size * tokens
    counts = {min(MAX_CHUNKS, -(-total // size)) for size in TOKENS_PER_CHUNK}
    return tuple(sorted({1, *counts}))


def fraction_steps(num_blocks: int) -> int:
    return FRACTION_STEPS["shallow" if num_blocks <= MAX_SHALLOW_BLOCKS else "deep"]
