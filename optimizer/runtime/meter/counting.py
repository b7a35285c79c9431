"""Chooses which of many steps the meter counts: counting costs Python for every op, and what one step has shown holds
for the next.

On the CPU device the meter's cap holds in counted steps alone; torch's own counters on CUDA always do.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

COUNT_EVERY_S: Final = 10.0
MOST_BETWEEN_S: Final = 60.0
"""A page that shows memory over a step shows one of the last minute."""
MOST_SHARE: Final = 0.002
"""Share of a run's time that counting may take: where a counted step is much slower than others, fewer are counted."""
NUM_FIRST_COUNTED: Final = 3
"""In the first step all that stays comes to be, and the next are steady; later ones are as those are."""
_NUM_REMEMBERED: Final = 8


class CountingPolicy:
    """The first steps, one in so many seconds, and what else the caller says. ``is_due`` is asked once as each step begins."""

    def __init__(self, *, every_s: float = COUNT_EVERY_S, now_s: Callable[[], float] | None = None) -> None:
        """every_s: 0 counts every step. now_s: a clock of the run's own time, where it does not always run."""
        self._every_s = every_s
        self._now_s = now_s or time.monotonic
        self._counted_at_s = float("-inf")
        self._took_s = {is_counted: deque[float](maxlen=_NUM_REMEMBERED) for is_counted in (False, True)}

    def is_due(self, index: int, *, is_last: bool = False) -> bool:
        """index: of the step, from 0."""
        now_s = self._now_s()
        if index >= NUM_FIRST_COUNTED and not is_last and now_s < self._counted_at_s + self.pause_s:
            return False
        self._counted_at_s = now_s
        return True

    def note(self, took_s: float, *, is_counted: bool) -> None:
        """Note the time of a step."""
        self._took_s[is_counted].append(took_s)

    @property
    def pause_s(self) -> float:
        """Until the next one is counted, by medians, since others disturb a machine."""
        counted, others = self._took_s[True], self._took_s[False]
        if not (self._every_s and counted and others):
            return self._every_s
        return max(self._every_s, min(MOST_BETWEEN_S, (statistics.median(counted) - statistics.median(others)) / MOST_SHARE))
