"""Reserved memory that a run's CUDA allocator may take above its budget: the runtime sets the limit, admission leaves room."""

from typing import Final

from optimizer.base.units import MIB

ALLOCATOR_SLACK_BYTES: Final = 256 * MIB
ALLOCATOR_SLACK_SHARE: Final = 0.125
"""Reserved memory may exceed the budget by the larger of the two: blocks are cut from segments of 2 or 20 MiB and more."""


def allocator_slack_bytes(budget_bytes: int) -> int:
    return max(ALLOCATOR_SLACK_BYTES, int(budget_bytes * ALLOCATOR_SLACK_SHARE))
