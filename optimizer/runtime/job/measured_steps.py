"""Adds up what an attempt's steps measured, and says when the run has shown enough of itself to be probed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from optimizer.runtime.job.training_run import Measured
from optimizer.runtime.meter.meter import Peak

_PROBE_STEPS = 4
"""Steps that were not counted, after which a run is probed; their median is what most of the run will take."""
_MOST_PROBE_STEPS = 20
"""Steps after which it is probed in any case: a long step is always counted."""


@dataclass(kw_only=True)
class MeasuredSteps:
    """The steady steps so far. A first step without optimizer state is left out, where it is not the only one."""

    sync_every: int = 1
    """Steps that ranks take from one moment at which they have the same weights to the next."""
    measured: Measured = field(default_factory=Measured)
    rank_peak_bytes: list[int] = field(default_factory=list)
    """Device peak of each rank in the last counted step, as far as ranks have exchanged it; empty on one device."""
    num_done: int = 0
    """Steps of this attempt, the first one included."""
    data_wait_ms: list[float] = field(default_factory=list)
    """Time that each step waited for its batches."""
    _step_ms: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """By whether the step was counted; without those at whose end ranks that take steps alone were brought together."""
    _together_ms: list[float] = field(default_factory=list)
    """Times of those."""

    @property
    def is_first(self) -> bool:
        """True until the attempt's first step was noted as done."""
        return self.num_done == 0

    def add(
        self, step_ms: float, *, is_counted: bool, peak: Peak, disk_peak_bytes: int, is_together: bool = True
    ) -> None:
        """Note the times and peaks of one steady step; peak: the highest of the last counted one. is_together: whether ranks have
        the same weights at its end.
        """
        is_apart = self.sync_every > 1 and is_together
        (self._together_ms if is_apart else self._step_ms[is_counted]).append(step_ms)
        known = self.measured
        is_higher = peak.device_bytes > known.device_peak_bytes
        self.measured = Measured(
            device_peak_bytes=max(peak.device_bytes, known.device_peak_bytes),
            rank_peak_bytes=_highest(self.rank_peak_bytes, known.rank_peak_bytes),
            device_bytes_by_category=peak.device_bytes_by_category if is_higher else known.device_bytes_by_category,
            host_peak_bytes=max(peak.host_bytes, known.host_peak_bytes),
            disk_peak_bytes=max(disk_peak_bytes, known.disk_peak_bytes),
            allocator_slack_bytes=max(peak.slack_bytes, known.allocator_slack_bytes),
            step_ms=self._mean_ms,
            num_steps=known.num_steps + 1,
        )

    @property
    def _mean_ms(self) -> float:
        """The median step, or of ranks that take steps alone the mean over a round of median steps, as far as there are both."""
        alone = self._step_ms[False] or self._step_ms[True] or self._together_ms
        alone_ms = statistics.median(alone)
        if not self._together_ms:
            return alone_ms
        return alone_ms + (statistics.median(self._together_ms) - alone_ms) / self.sync_every

    @property
    def can_be_probed(self) -> bool:
        """True once enough steps were timed as most are: without counting, where some are not counted; of ranks that take steps
        alone once they were brought together, too.
        """
        if self.sync_every > 1 and not self._together_ms:
            return False
        return len(self._step_ms[False]) >= _PROBE_STEPS or self.num_done >= _MOST_PROBE_STEPS

    @property
    def median_data_wait_ms(self) -> float | None:
        return statistics.median(self.data_wait_ms) if self.data_wait_ms else None


def _highest(found: Sequence[int], known: Sequence[int]) -> list[int]:
    """By rank the higher of two peaks, of which either may not be there yet."""
    return [max(pair) for pair in zip(found or known, known or found, strict=True)]
