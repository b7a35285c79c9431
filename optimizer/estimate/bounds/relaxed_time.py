"""The sums of milliseconds that a step is at least as long as: what has to be done one after the other. Torch-free.

For each sum what a block adds by what it does, what all else adds, and what it is more where the optimizer's state leaves.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import LANES

Numbers = NDArray[np.float64]
_COMPUTE, _IN, _OUT, _HOST, _DISK, _NETWORK = (
    LANES.index(lane) for lane in ("compute", "copy_in", "copy_out", "host", "disk", "network")
)
_BESIDE_CPU: Final = (_DISK, _NETWORK)
"""Lanes that do not hold the CPU device up."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchTimes:
    """Milliseconds [.., lane] of what is done in each micro-batch, forward and back; the first one's backward is by itself."""

    forward: Numbers
    first: Numbers
    later: Numbers
    num_later: int

    def forward_ms(self, lane: int) -> Numbers:
        """Milliseconds of forward in the first micro-batch."""
        found: Numbers = self.forward[..., lane]
        return found

    def rest_ms(self, lane: int) -> Numbers:
        """Milliseconds after the first micro-batch's forward."""
        found: Numbers = self.first[..., lane] + self.num_later * (self.forward[..., lane] + self.later[..., lane])
        return found

    def all_ms(self, lane: int) -> Numbers:
        return self.forward_ms(lane) + self.rest_ms(lane)

    def skipped_ms(self) -> Numbers:
        """Compute of the micro-batches that the clock does not run, as they are alike."""
        found: Numbers = max(0, self.num_later - 1) * (self.forward[..., _COMPUTE] + self.later[..., _COMPUTE])
        return found

    def gradients_ms(self, lane: int) -> Numbers:
        """Time of gradients that leave in the micro-batches that it does run."""
        found: Numbers = self.first[..., lane] + min(1, self.num_later) * self.later[..., lane]
        return found

    def link_ms(self, *, after_forward: bool) -> Numbers:
        """Both directions, which share one queue: what blocks wait for, and gradients."""
        waited = self.rest_ms(_IN) + self.num_later * self.forward_ms(_OUT)
        if not after_forward:
            waited = waited + self.forward_ms(_IN) + self.forward_ms(_OUT)
        return waited + self.gradients_ms(_OUT)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Clipping and the update, with all of the state away that may be."""

    lanes: Numbers
    clip_ms: float
    whole_ms: float
    """Milliseconds of the update where all of the state is on the device."""
    fetched_ms: float
    """Gradients that come back from the host for the state that stays, or would if all of it did."""
    is_away: bool
    is_free: bool
    behind_ms: tuple[float, float]
    """Milliseconds of forward that come after all updates on the host, and how much less of it where all of the state
    leaves."""
    held_up_ms: float = 0.0
    """Milliseconds for which compute waits for other ranks in backward, and the next two: beside backward, and after it."""
    beside_ms: float = 0.0
    after_ms: float = 0.0
    last_ms: float | None
    """Most time before the end of backward at which the host's updates begin, where they begin during it; None where
    they follow it."""

    @property
    def host_ms(self) -> float:
        """Milliseconds of the host's work before the next forward is over: the busiest of the host, the disk and the network."""
        return float(max(self.lanes[_HOST], self.lanes[_DISK], self.lanes[_NETWORK])) if self.is_away else 0.0


Sum = tuple[Numbers, Numbers, float]
"""Milliseconds as [template, form] of each block, [chunks] of all else, and where all of the state leaves that may."""


def sums_on_cpu(inside: MicroBatchTimes, around: MicroBatchTimes, update: Update, *, head_ms: Numbers) -> list[Sum]:
    """One thread does all but what the disk and the network do."""
    del head_ms
    own = [lane for lane in range(len(LANES)) if lane not in _BESIDE_CPU]

    def serial_ms(of: MicroBatchTimes) -> Numbers:
        return sum((of.all_ms(lane) for lane in own), np.zeros(()))

    update_ms = float(update.lanes[own].sum())
    leaving_ms = update_ms - float(update.lanes[_COMPUTE]) - update.whole_ms if update.is_free else 0.0
    exchange_ms = update.held_up_ms + update.after_ms
    rows = [(serial_ms(inside), serial_ms(around) + update_ms - leaving_ms + exchange_ms, leaving_ms)]
    rows += [(inside.all_ms(lane), around.all_ms(lane), 0.0) for lane in _BESIDE_CPU]
    return rows


def sums_on_cuda(inside: MicroBatchTimes, around: MicroBatchTimes, update: Update, *, head_ms: Numbers) -> list[Sum]:
    """A step is forward of the first micro-batch, the rest, clipping and the update. In that order: forward waits for the host's
    updates of the step before; what comes back to blocks comes after forward; gradients have left before clipping."""
    leaving_ms = -update.whole_ms - update.fetched_ms if update.is_free else 0.0
    tail_ms = float(update.lanes[_COMPUTE]) + update.whole_ms + update.fetched_ms + update.after_ms
    forwards = [(inside.forward_ms(_COMPUTE), around.forward_ms(_COMPUTE), tail_ms, leaving_ms)]
    if update.is_away:
        behind_ms, less_ms = update.behind_ms
        after_ms = update.clip_ms + update.fetched_ms if update.last_ms is None else -update.last_ms
        slower_ms = update.host_ms - (update.fetched_ms if update.last_ms is None else 0.0) - less_ms
        none = np.zeros_like(inside.forward_ms(_COMPUTE))
        if update.is_free:
            forwards.append((none, head_ms, after_ms + behind_ms, slower_ms))
        else:
            forwards.append((none, head_ms, after_ms + update.host_ms, 0.0))
    rests = [
        (inside.rest_ms(_COMPUTE), around.rest_ms(_COMPUTE) + update.held_up_ms),
        (inside.link_ms(after_forward=True), around.link_ms(after_forward=True)),
        (inside.gradients_ms(_HOST) + inside.skipped_ms(), around.gradients_ms(_HOST) + around.skipped_ms()),
    ]
    rows = [
        (forward + rest, fixed_forward + fixed_rest + tail, leaving)
        for forward, fixed_forward, tail, leaving in forwards
        for rest, fixed_rest in rests
    ]
    alone = [(inside.link_ms(after_forward=False), around.link_ms(after_forward=False))]
    alone.append((inside.all_ms(_DISK), around.all_ms(_DISK)))
    # Weights of other ranks, and between them the sums that compute waits for.
    alone.append((inside.all_ms(_NETWORK), around.all_ms(_NETWORK) + update.held_up_ms))
    if update.beside_ms:
        # No gradient is sent before the last micro-batch's forward has ended.
        alone.append((inside.forward_ms(_COMPUTE), around.forward_ms(_COMPUTE) + update.beside_ms))
    return [*rows, *((block_ms, fixed + tail_ms, leaving_ms) for block_ms, fixed in alone)]
