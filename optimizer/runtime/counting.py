"""Which of many steps the meter counts: counting costs Python for every op, and what one step has shown holds for the next.

On the CPU device the meter's cap holds in counted steps alone; torch's own counters on CUDA always do.
"""

import time
from typing import Final

COUNT_EVERY_S: Final = 10.0
NUM_FIRST_COUNTED: Final = 3
"""In the first step all that stays comes to be, and the next are steady; later ones are as those are."""


class CountingPolicy:
    """The first steps, one in so many seconds, and what else the caller says. ``is_due`` is asked once as each step begins."""

    def __init__(self, *, every_s: float = COUNT_EVERY_S) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    def is_due(self, index: int, *, is_last: bool = False) -> bool:
        """index: of the step, from 0."""
        now_s = time.monotonic()
        if index >= NUM_FIRST_COUNTED and not is_last and now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True
