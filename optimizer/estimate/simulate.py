"""Runs a schedule: bytes over time per category, the peak and what is in memory at it, the time of each lane and of the step.

On the CPU device one thread computes, copies and updates; only the disk and the network work beside it. On CUDA copies run in
order on a stream of their own, and the host, the disk and the network beside that; compute waits for what it needs and is not
there yet. A step's work on the host may reach into the next step, so such a step is run twice and the second counts.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from optimizer.categories import Link
from optimizer.estimate.compiled import Bytes
from optimizer.estimate.prediction import LANES, Lane
from optimizer.estimate.tasks import Legs, Schedule, Task, Transfer
from optimizer.time_kinds import COMPUTE_KINDS
from optimizer.units import MIB

_BESIDE: Mapping[str, Mapping[Lane, int]] = {
    "cpu": {"disk": 1, "network": 2},
    "cuda": {"copy_out": 1, "copy_in": 1, "host": 2, "disk": 3, "network": 4},
}
"""Lanes that do not hold compute up, by device, with the queue each works off; CUDA's copies share one."""


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes that are there before the step and after it."""

    device: Bytes
    """By category: weights, optimizer state."""
    host: int = 0
    disk: int = 0
    remote: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of tasks placed in the step: where it begins, in time and in bytes."""

    tasks: tuple[Task, ...]
    starts_ms: tuple[float, ...]
    levels: Bytes
    """[task, category]: device bytes at each task's highest point."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A whole step."""

    rows: tuple[Row, ...]
    resident: Bytes
    peak: Bytes
    """Device bytes by category at the peak."""
    peak_task: Task
    host_peak_bytes: int
    disk_peak_bytes: int
    remote_peak_bytes: int
    copied_bytes: dict[Link, int]
    step_ms: float
    busy_ms: dict[Lane, float]
    exposed_ms: dict[Lane, float]
    """Time that compute stood still for each other lane."""
    kinds_ms: dict[str, float]
    """Compute's own time by COMPUTE_KINDS, and ``allocation``."""
    kinds_work: dict[str, float]
    """FLOPs of products and attention, bytes of the other kinds of op."""
    recomputed_ms: float
    """Of ``kinds_ms``, what is done a second time."""


def simulate(
    schedule: Schedule,
    *,
    resident: Resident,
    device_kind: str,
    fresh_bytes_per_s: float | None = None,
) -> Simulation:
    """device_kind: which lanes run beside compute. fresh_bytes_per_s: of the CPU device's memory (``Rates``)."""
    timing = _time_step(schedule, _BESIDE[device_kind])
    rows = _place_rows(schedule, resident, timing)
    tops = [row.levels.sum(axis=1) for row in rows]
    best_row = max(range(len(rows)), key=lambda index: (int(tops[index].max()), -index))
    best_task = int(tops[best_row].argmax())
    beyond = _highest_beyond(schedule)
    kinds_ms, kinds_work, recomputed_ms = _sum_kinds(schedule)
    if device_kind == "cpu" and fresh_bytes_per_s is not None:
        transient_bytes = max(int(top.max()) for top in tops) - int(resident.device.sum()) + beyond[0]
        kinds_ms["allocation"] = estimate_fresh_ms(transient_bytes, fresh_bytes_per_s=fresh_bytes_per_s)
    return Simulation(
        rows=tuple(rows),
        resident=resident.device,
        peak=rows[best_row].levels[best_task],
        peak_task=rows[best_row].tasks[best_task],
        host_peak_bytes=resident.host + beyond[0],
        disk_peak_bytes=resident.disk + beyond[1],
        remote_peak_bytes=resident.remote + beyond[2],
        copied_bytes=_count_copies(schedule),
        step_ms=timing.total_ms + kinds_ms.get("allocation", 0.0),
        busy_ms=_busy_ms(schedule),
        exposed_ms=timing.exposed_ms,
        kinds_ms=kinds_ms,
        kinds_work=kinds_work,
        recomputed_ms=recomputed_ms,
    )


# Bytes.

_MAX_SHOWN = 2
"""Later micro-batches that are laid out for the timeline; they are alike, and the last is the highest."""


def _place_rows(schedule: Schedule, resident: Resident, timing: "_Timing") -> list[Row]:
    def row(tasks: tuple[Task, ...], levels: Bytes, starts: Sequence[float], offset_ms: float) -> Row:
        return Row(
            tasks=tasks,
            levels=levels,
            starts_ms=tuple((offset_ms + start) for start in starts),
        )

    levels, net = _levels(schedule.first)
    base = resident.device
    rows = [row(schedule.first, base + levels, timing.first_starts_ms, 0.0)]
    base = base + net
    if schedule.num_later:
        levels, net = _levels(schedule.later)
        for index in sorted({*range(min(schedule.num_later, _MAX_SHOWN - 1)), schedule.num_later - 1}):
            offset_ms = timing.first_ms + index * timing.later_ms
            # What one leaves beside its inputs, it left when the one before it ended.
            here = base + index * schedule.carried + (min(index, 1) * (net - schedule.carried))
            rows.append(row(schedule.later, here + levels, timing.later_starts_ms, offset_ms))
        base = base + net + (schedule.num_later - 1) * schedule.carried
    if schedule.update:
        levels, _ = _levels(schedule.update)
        offset_ms = timing.first_ms + schedule.num_later * timing.later_ms
        rows.append(row(schedule.update, base + levels, timing.update_starts_ms, offset_ms))
    return rows


def find_highest(schedule: Schedule, resident: Bytes) -> tuple[Bytes, Task]:
    """Device bytes at the peak of a step, and the task it falls in, as ``simulate`` finds them."""
    runs = [(schedule.first, resident)]
    base = resident + _net(schedule.first)
    if schedule.num_later:
        net = _net(schedule.later)
        runs.append((schedule.later, base))
        base = base + net + (schedule.num_later - 1) * schedule.carried
        runs.append((schedule.later, base - schedule.carried if schedule.num_later > 1 else base - net))
    runs.append((schedule.update, base))
    best, best_task = resident, schedule.first[0]
    for tasks, start in runs:
        levels = start + _levels(tasks)[0]
        top = int(levels.sum(axis=1).argmax())
        if int(levels[top].sum()) > int(best.sum()):
            best, best_task = levels[top], tasks[top]
    return best, best_task


def _net(tasks: tuple[Task, ...]) -> Bytes:
    net: Bytes = np.array([task.bytes.net for task in tasks]).sum(axis=0)
    return net


def _levels(tasks: tuple[Task, ...]) -> tuple[Bytes, Bytes]:
    """Each task's highest point above the first one's start, and what all leave behind."""
    nets = np.array([task.bytes.net for task in tasks])
    after = nets.cumsum(axis=0)
    return after - nets + np.array([task.bytes.at_rise for task in tasks]), after[-1]


def _highest_beyond(schedule: Schedule) -> list[int]:
    """On the host, the disk and the remote store, above what is always there."""
    highest = np.zeros(3, dtype=np.int64)
    for tasks in (schedule.first, schedule.later, schedule.update):
        if tasks:
            table = np.array([task.bytes.beyond for task in tasks])
            nets, rises = table[:, 0::2], table[:, 1::2]
            highest = np.maximum(highest, (nets.cumsum(axis=0) - nets + rises).max(axis=0))
    return [int(num_bytes) for num_bytes in highest]


def _count_copies(schedule: Schedule) -> dict[Link, int]:
    counted: dict[Link, int] = {}
    for tasks, times in ((schedule.first, 1), (schedule.later, schedule.num_later), (schedule.update, 1)):
        for task in tasks:
            for link, num_bytes in task.copied.items():
                counted[link] = counted.get(link, 0) + times * num_bytes
    return counted


def _busy_ms(schedule: Schedule) -> dict[Lane, float]:
    total = np.zeros(len(LANES))
    for tasks, times in ((schedule.first, 1), (schedule.later, schedule.num_later), (schedule.update, 1)):
        if tasks:
            total += times * np.array([task.time.by_lane for task in tasks]).sum(axis=0)
    return dict(zip(LANES, total.tolist(), strict=True))


def _sum_kinds(schedule: Schedule) -> tuple[dict[str, float], dict[str, float], float]:
    total = np.zeros(2 * len(COMPUTE_KINDS) + 1)
    for tasks, times in ((schedule.first, 1), (schedule.later, schedule.num_later), (schedule.update, 1)):
        if tasks:
            total += times * np.array([task.time.by_kind for task in tasks]).sum(axis=0)
    num_kinds = len(COMPUTE_KINDS)
    kinds_ms = dict(zip(COMPUTE_KINDS, total[:num_kinds].tolist(), strict=True))
    return kinds_ms, dict(zip(COMPUTE_KINDS, total[num_kinds:-1].tolist(), strict=True)), float(total[-1])


# Time.

KEPT_BYTES = 64 * MIB
"""What the C library keeps of memory that is freed at the end of a step for the next (glibc: twice the largest threshold from
which it maps memory apart, M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in mallopt(3)); what is beyond goes back to
the system. Rough: how much of the rest it keeps too, or gives back beside, depends on the order of frees."""


def estimate_fresh_ms(transient_bytes: int, *, fresh_bytes_per_s: float) -> float:
    """Of touching a step's memory for the first time again, where the process gave it back after the step before.

    transient_bytes: at their most, above what stays between steps.
    """
    return max(0, transient_bytes - KEPT_BYTES) / fresh_bytes_per_s * 1000


@dataclass(kw_only=True)
class _Timing:
    first_starts_ms: list[float]
    later_starts_ms: list[float]
    update_starts_ms: list[float]
    first_ms: float
    later_ms: float
    total_ms: float
    exposed_ms: dict[Lane, float]


def _time_step(schedule: Schedule, beside: Mapping[Lane, int]) -> _Timing:
    clock = _Clock(beside)
    timing = _run_step(schedule, clock)
    if clock.has_work_left:
        clock.begin_again()
        timing = _run_step(schedule, clock)
    return timing


def _run_step(schedule: Schedule, clock: "_Clock") -> _Timing:
    first_starts = clock.run(schedule.first)
    first_ms = clock.now_ms
    later_starts: list[float] = []
    later_ms = 0.0
    exposed_ms = dict(clock.exposed_ms)
    if schedule.num_later:
        later_starts = [start - first_ms for start in clock.run(schedule.later)]
        later_ms = clock.now_ms - first_ms
        clock.skip(later_ms, times=schedule.num_later - 1, exposed_before_ms=exposed_ms)
    before_update_ms = clock.now_ms
    update_starts = [start - before_update_ms for start in clock.run(schedule.update)]
    return _Timing(
        first_starts_ms=first_starts,
        later_starts_ms=later_starts,
        update_starts_ms=update_starts,
        first_ms=first_ms,
        later_ms=later_ms,
        total_ms=clock.now_ms,
        exposed_ms=dict(clock.exposed_ms),
    )


@dataclass
class _Clock:
    """Compute's own time, and what works beside it."""

    beside: Mapping[Lane, int]
    now_ms: float = 0.0
    exposed_ms: dict[Lane, float] = field(default_factory=dict)
    _free_ms: list[float] = field(default_factory=lambda: [0.0] * 5)
    """When each queue is done with what it was given."""
    _under_way: dict[Hashable, tuple[float, Lane, Legs]] = field(default_factory=dict)
    """When it is done as far as it runs beside compute, the lane that is last, and what compute's thread has still to do."""
    _block_end_ms: dict[int, float] = field(default_factory=dict)

    @property
    def has_work_left(self) -> bool:
        return bool(self._under_way)

    def run(self, tasks: Sequence[Task]) -> list[float]:
        """When each begins."""
        starts = []
        for task in tasks:
            starts.append(self.now_ms)
            for key in task.waits_for:
                if key in self._under_way:
                    self._finish(key)
            for transfer in task.arrives:
                if transfer.key not in self._under_way:
                    self._begin(transfer)
                self._finish(transfer.key)
            for transfer in task.begins:
                self._begin(transfer)
            for legs in task.leaves:
                self._leave(legs)
            if task.drains:
                self._drain()
            self.now_ms += task.time.compute_ms
            if task.block >= 0 and task.phase == "backward":
                self._block_end_ms[task.block] = self.now_ms
        return starts

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
        self._under_way = {key: (done + shift_ms, *rest) for key, (done, *rest) in self._under_way.items()}  # type: ignore[misc]
        self._block_end_ms = {block: end + shift_ms for block, end in self._block_end_ms.items()}

    def _begin(self, transfer: Transfer) -> None:
        begin_ms = self.now_ms
        if transfer.after_block is not None:
            begin_ms = self._block_end_ms.get(transfer.after_block, begin_ms)
        own = tuple(leg for leg in transfer.legs if leg[0] not in self.beside)
        beside = tuple(leg for leg in transfer.legs if leg[0] in self.beside)
        done_ms, lane = self._queue(beside, begin_ms)
        self._under_way[transfer.key] = (done_ms, lane, own)

    def _finish(self, key: Hashable) -> None:
        done_ms, lane, own = self._under_way.pop(key)
        self._work(own)
        self._wait(done_ms, lane)

    def _leave(self, legs: Legs) -> None:
        self._work(tuple(leg for leg in legs if leg[0] not in self.beside))
        self._queue(tuple(leg for leg in legs if leg[0] in self.beside), self.now_ms)

    def _work(self, legs: Legs) -> None:
        """On compute's own thread."""
        for lane, lane_ms in legs:
            self._expose(lane, lane_ms)
            self.now_ms += lane_ms

    def _queue(self, legs: Legs, begin_ms: float) -> tuple[float, Lane]:
        """Each leg begins when the one before has begun, and ends when that has ended at the earliest."""
        done_ms, last = begin_ms, "copy_in"
        for lane, lane_ms in legs:
            queue = self.beside[lane]
            begin_ms = max(begin_ms, self._free_ms[queue])
            own_ms = begin_ms + lane_ms
            if own_ms >= done_ms:
                done_ms, last = own_ms, lane
            self._free_ms[queue] = done_ms
        return done_ms, last  # type: ignore[return-value]

    def _wait(self, until_ms: float, lane: Lane) -> None:
        if until_ms > self.now_ms:
            self._expose(lane, until_ms - self.now_ms)
            self.now_ms = until_ms

    def _drain(self) -> None:
        for lane, queue in self.beside.items():
            self._wait(self._free_ms[queue], lane)
        for key in list(self._under_way):
            self._finish(key)

    def _expose(self, lane: Lane, lane_ms: float) -> None:
        if lane_ms > 0:
            self.exposed_ms[lane] = self.exposed_ms.get(lane, 0.0) + lane_ms
