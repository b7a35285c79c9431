"""The time of a step: when each task begins, what works beside compute, and what compute waits for. Torch-free.

Compute waits for what it needs and is not there yet. A step's work on the host may reach into the next step, so such a step is
run twice and the second counts.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from optimizer.base.categories import Lane
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.tasks.transfers import BESIDE, NUM_QUEUES, Begun, Event, Legs


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of a step."""

    first_starts_ms: list[float]
    """Time at which each task begins: of the first micro-batch in the step, of the others and the update in their run."""
    later_starts_ms: list[float]
    update_starts_ms: list[float]
    first_ms: float
    later_ms: float
    total_ms: float
    exposed_ms: dict[Lane, float]
    """Time that compute stood still for each other lane."""


def time_step(schedule: Schedule, *, device_kind: str) -> Timing:
    """Time a schedule. device_kind: which lanes run beside compute."""
    clock = Clock(device_kind)
    timing = _run_step(schedule, clock)
    if clock.has_work_left:
        clock.begin_again()
        timing = _run_step(schedule, clock)
    return timing


def _run_step(schedule: Schedule, clock: "Clock") -> Timing:
    first_starts = clock.run(schedule.first)
    first_ms = clock.now_ms
    last, last_starts = schedule.first, first_starts
    later_starts: list[float] = []
    later_ms = 0.0
    exposed_ms = dict(clock.exposed_ms)
    if schedule.num_later:
        last, last_starts = schedule.later, clock.run(schedule.later)
        later_starts = [start - first_ms for start in last_starts]
        later_ms = clock.now_ms - first_ms
    clock.note_block_ends(last, last_starts, update=schedule.update)
    if schedule.num_later:
        clock.skip(later_ms, times=schedule.num_later - 1, exposed_before_ms=exposed_ms)
    before_update_ms = clock.now_ms
    update_starts = [start - before_update_ms for start in clock.run(schedule.update)]
    return Timing(
        first_starts_ms=first_starts,
        later_starts_ms=later_starts,
        update_starts_ms=update_starts,
        first_ms=first_ms,
        later_ms=later_ms,
        total_ms=clock.now_ms,
        exposed_ms=dict(clock.exposed_ms),
    )


@dataclass
class Clock:
    """Compute's own time, and what works beside it, from task to task."""

    device_kind: str
    now_ms: float = 0.0
    exposed_ms: dict[Lane, float] = field(default_factory=dict)
    _free_ms: list[float] = field(default_factory=lambda: [0.0] * NUM_QUEUES)
    """Time at which each queue is done with what it was given."""
    _under_way: dict[Hashable, tuple[float, Lane, Legs]] = field(default_factory=dict)
    """Time at which a transfer is done as far as it runs beside compute, the lane that is last, and what compute's
    thread has still to do."""
    _block_end_ms: dict[int, float] = field(default_factory=dict)

    @property
    def has_work_left(self) -> bool:
        return bool(self._under_way)

    def run(self, run: TaskRun) -> list[float]:
        """Run the tasks in order; returns the time at which each begins."""
        compute_ms, events, acts = run.steps(self.device_kind)
        if not acts and not self._under_way:
            starts = list(accumulate(compute_ms, initial=self.now_ms))
            self.now_ms = starts.pop()
            return starts
        starts = []
        now_ms, under_way = self.now_ms, self._under_way
        for own_ms, event in zip(compute_ms, events, strict=True):
            starts.append(now_ms)
            if event is not None and (event.acts or not under_way.keys().isdisjoint(event.waits_for)):
                self.now_ms = now_ms
                self._do(event)
                now_ms = self.now_ms
            now_ms += own_ms
        self.now_ms = now_ms
        return starts

    def note_block_ends(self, run: TaskRun, starts_ms: list[float], *, update: TaskRun) -> None:
        """Note when the backward of each block ended, where the update has transfers that could begin then. The run is
        over.
        """
        if not update.follows_blocks:
            return
        for task, end_ms in zip(run.tasks, (*starts_ms[1:], self.now_ms), strict=True):
            if task.block >= 0 and task.phase == "backward":
                self._block_end_ms[task.block] = end_ms

    def skip(self, each_ms: float, *, times: int, exposed_before_ms: Mapping[Lane, float]) -> None:
        """The last run again, so many times; it took ``each_ms``, and ``exposed_before_ms`` is from before it."""
        self._shift(each_ms * times)
        self.now_ms += each_ms * times
        for lane, lane_ms in self.exposed_ms.items():
            self.exposed_ms[lane] = lane_ms + times * (lane_ms - exposed_before_ms.get(lane, 0.0))

    def begin_again(self) -> None:
        """A new step, with what is under way."""
        self._shift(-self.now_ms)
        self.now_ms = 0.0
        self.exposed_ms = {}

    def _shift(self, shift_ms: float) -> None:
        self._free_ms = [free + shift_ms for free in self._free_ms]
        self._block_end_ms = {block: end + shift_ms for block, end in self._block_end_ms.items()}
        for key, (done_ms, lane, own) in self._under_way.items():
            self._under_way[key] = done_ms + shift_ms, lane, own

    def _do(self, event: Event) -> None:
        waits_for, arrives, begins, leaves, drains, _ = event
        under_way = self._under_way
        for key in waits_for:
            if key in under_way:
                self._finish(key)
        for transfer in arrives:
            if transfer.key not in under_way:
                self._begin_transfer(transfer)
            self._finish(transfer.key)
        for transfer in begins:
            self._begin_transfer(transfer)
        for own, queued in leaves:
            if own:
                self._work(own)
            self._queue(queued, self.now_ms)
        if drains:
            self._drain()

    def _begin_transfer(self, transfer: Begun) -> None:
        key, after_block, own, queued = transfer
        begin_ms = self.now_ms
        if after_block is not None:
            begin_ms = self._block_end_ms.get(after_block, begin_ms)
        done_ms, lane = self._queue(queued, begin_ms)
        self._under_way[key] = done_ms, lane, own

    def _finish(self, key: Hashable) -> None:
        done_ms, lane, own = self._under_way.pop(key)
        if own:
            self._work(own)
        if done_ms > self.now_ms:
            self._wait(done_ms, lane)

    def _work(self, legs: Legs) -> None:
        """Spend time on compute's own thread."""
        for lane, lane_ms in legs:
            self._expose(lane, lane_ms)
            self.now_ms += lane_ms

    def _queue(self, legs: tuple[tuple[int, float, Lane], ...], begin_ms: float) -> tuple[float, Lane]:
        """Each leg begins when the one before has begun, and ends when that has ended at the earliest."""
        done_ms = begin_ms
        last: Lane = "copy_in"
        free_ms = self._free_ms
        for queue, lane_ms, lane in legs:
            if free_ms[queue] > begin_ms:
                begin_ms = free_ms[queue]
            own_ms = begin_ms + lane_ms
            if own_ms >= done_ms:
                done_ms, last = own_ms, lane
            free_ms[queue] = done_ms
        return done_ms, last

    def _wait(self, until_ms: float, lane: Lane) -> None:
        if until_ms > self.now_ms:
            self._expose(lane, until_ms - self.now_ms)
            self.now_ms = until_ms

    def _drain(self) -> None:
        for lane, queue in BESIDE[self.device_kind].items():
            self._wait(self._free_ms[queue], lane)
        for key in list(self._under_way):
            self._finish(key)

    def _expose(self, lane: Lane, lane_ms: float) -> None:
        if lane_ms > 0:
            self.exposed_ms[lane] = self.exposed_ms.get(lane, 0.0) + lane_ms
