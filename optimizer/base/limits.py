"""Limits that several parts of the program keep."""

from collections.abc import Sequence
from typing import Final

MAX_DEVICES: Final = 64
"""Most devices that one job runs on."""
MAX_STAGES: Final = 1024
"""Most stages that a model is cut into for training, where a device may have several."""


def find_stages_fault(stage_blocks: Sequence[int], *, most: int = MAX_DEVICES) -> str:
    """Words on a number of stages that is not allowed, or a stage without a block; empty where there is neither."""
    if stage_blocks and not 2 <= len(stage_blocks) <= most:
        return f"allowed: 2 to {most} stages, or none"
    empty = next((stage for stage, number in enumerate(stage_blocks, 1) if number < 1), None)
    return "" if empty is None else f"which leaves stage {empty} without a block; each stage needs one at least"
