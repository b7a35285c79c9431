"""Runs a schedule: bytes over time per category, the peak and what is in memory at it, the time of each lane and of the step.

What a search compares (time, peaks, bytes moved) is found at once, in sums over all categories. What a person is shown is worked
out when it is first asked for, from the same schedule.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, LANES, Lane, Link
from optimizer.base.heap import KEPT_BYTES
from optimizer.estimate.step.clock import Timing, time_step
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.tasks.tasks import NUM_BEYOND, Task
from optimizer.profile.time_kinds import COMPUTE_KINDS


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes that are there before the step and after it."""

    device: Bytes
    """Device bytes by category: weights, optimizer state."""
    host: int = 0
    disk: int = 0
    remote: int = 0

    @cached_property
    def device_bytes(self) -> int:
        """Device bytes over all categories."""
        return int(self.device.sum())


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of tasks placed in the step: where it begins, in time and in bytes."""

    tasks: tuple[Task, ...]
    starts_ms: tuple[float, ...]
    levels: Bytes
    """Device bytes at each task's highest point, as [task, category]."""


class Simulation:
    """A whole step."""

    def __init__(self, schedule: Schedule, resident: Resident, timing: Timing, *, fresh_bytes_per_s: float | None) -> None:
        self._schedule = schedule
        self._timing = timing
        self.resident = resident.device
        self._highest = Highest(schedule, resident.device, resident_bytes=resident.device_bytes)
        self.device_peak_bytes = self._highest.num_bytes
        runs = (schedule.first, schedule.later, schedule.update)
        beyond = [max(run.sums.beyond_top[place] for run in runs) for place in range(NUM_BEYOND)]
        self.host_peak_bytes = resident.host + beyond[0]
        self.disk_peak_bytes = resident.disk + beyond[1]
        self.remote_peak_bytes = resident.remote + beyond[2]
        self.allocation_ms: float | None = None
        if fresh_bytes_per_s is not None:
            transient_bytes = self.device_peak_bytes - resident.device_bytes + beyond[0]
            self.allocation_ms = estimate_fresh_ms(transient_bytes, fresh_bytes_per_s=fresh_bytes_per_s)
        self.step_ms = timing.total_ms + (self.allocation_ms or 0.0)
        self.exposed_ms: dict[Lane, float] = timing.exposed_ms
        """Time that compute stood still for each other lane."""

    @property
    def peak_task(self) -> Task:
        return self._highest.task

    @property
    def peak_index(self) -> int:
        """Index in its run of the task with the peak."""
        return self._highest.task_index

    @property
    def peak(self) -> Bytes:
        """Device bytes by category at the peak."""
        return self._highest.by_category

    @cached_property
    def copied_bytes(self) -> dict[Link, int]:
        counted: dict[Link, int] = {}
        for run, times in _counted_runs(self._schedule):
            for link, num_bytes in run.sums.copied.items():
                counted[link] = counted.get(link, 0) + times * num_bytes
        return counted

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(_place_rows(self._schedule, self.resident, self._timing))

    @property
    def exchanges_ms(self) -> list[tuple[float, float]]:
        """From and to of each exchange with other ranks, in order, from the step's beginning."""
        timing, schedule = self._timing, self._schedule
        placed = [(schedule.first, timing.first_starts_ms, 0.0)]
        for index in range(schedule.num_later):
            placed.append((schedule.later, timing.later_starts_ms, timing.first_ms + index * timing.later_ms))
        end_ms = timing.first_ms + schedule.num_later * timing.later_ms
        placed.append((schedule.update, timing.update_starts_ms, end_ms))
        return [
            (offset_ms + start, offset_ms + start + task.time.network_ms)
            for run, starts, offset_ms in placed
            for task, start in zip(run.tasks, starts, strict=True)
            if task.time.network_ms
        ]

    @cached_property
    def busy_ms(self) -> dict[Lane, float]:
        total = np.zeros(len(LANES))
        for run, times in _counted_runs(self._schedule):
            if run.tasks:
                total += times * _sum_rows([task.time.by_lane for task in run.tasks])
        return dict(zip(LANES, total.tolist(), strict=True))

    @property
    def kinds_ms(self) -> dict[str, float]:
        """Compute's own time by COMPUTE_KINDS, and ``allocation``."""
        kinds_ms: dict[str, float] = dict(zip(COMPUTE_KINDS, self._kinds[:_NUM_KINDS], strict=True))
        if self.allocation_ms is not None:
            kinds_ms["allocation"] = self.allocation_ms
        return kinds_ms

    @property
    def kinds_work(self) -> dict[str, float]:
        """FLOPs of products and attention, bytes of the other kinds of op."""
        return dict(zip(COMPUTE_KINDS, self._kinds[_NUM_KINDS:-1], strict=True))

    @property
    def recomputed_ms(self) -> float:
        """Time of ``kinds_ms`` that is spent on doing something a second time."""
        return self._kinds[-1]

    @cached_property
    def _kinds(self) -> list[float]:
        total = np.zeros(2 * _NUM_KINDS + 1)
        for run, times in _counted_runs(self._schedule):
            if run.tasks:
                total += times * _sum_rows([task.time.by_kind for task in run.tasks])
        kinds: list[float] = total.tolist()
        return kinds


_NUM_KINDS = len(COMPUTE_KINDS)


def _sum_rows(rows: Sequence[tuple[float, ...]]) -> NDArray[np.float64]:
    """The sum of times that many tasks share: each once, times how many there are."""
    count = Counter(map(id, rows))
    if 2 * len(count) > len(rows):
        total: NDArray[np.float64] = np.array(rows).sum(axis=0)
        return total
    distinct = {id(row): row for row in rows}
    shared: NDArray[np.float64] = np.array([count[key] for key in distinct], dtype=np.float64) @ np.array(list(distinct.values()))
    return shared


def simulate(
    schedule: Schedule,
    *,
    resident: Resident,
    device_kind: str,
    fresh_bytes_per_s: float | None = None,
) -> Simulation:
    """Simulate a schedule. device_kind: which lanes run beside compute. fresh_bytes_per_s: of the CPU device's memory
    (``Rates``).
    """
    return Simulation(
        schedule,
        resident,
        time_step(schedule, device_kind=device_kind),
        fresh_bytes_per_s=fresh_bytes_per_s if device_kind == "cpu" else None,
    )


def _counted_runs(schedule: Schedule) -> tuple[tuple[TaskRun, int], ...]:
    """The runs of a step, with how often each is run."""
    return (schedule.first, 1), (schedule.later, schedule.num_later), (schedule.update, 1)


# Bytes.

_MAX_SHOWN = 2
"""Later micro-batches that are laid out for the timeline; they are alike, and the last is the highest."""


class Highest:
    """The highest point of a step, the first of such; what is in memory then is worked out when it is asked for."""

    def __init__(self, schedule: Schedule, resident: Bytes, *, resident_bytes: int) -> None:
        """Find the highest moment. resident_bytes: ``resident`` over all categories."""
        self._schedule, self._resident = schedule, resident
        self._run, self._num_before = schedule.first, 0
        self.num_bytes = resident_bytes + schedule.first.sums.top
        """Bytes over all categories."""
        later = [(schedule.later, index) for index in (0, schedule.num_later - 1) if schedule.num_later]
        update = [(schedule.update, schedule.num_later)] if schedule.update.tasks else []
        for run, num_before in (*later, *update):
            high_bytes = resident_bytes + self._net_before(num_before) + run.sums.top
            if high_bytes > self.num_bytes:
                self.num_bytes, self._run, self._num_before = high_bytes, run, num_before

    @property
    def task_index(self) -> int:
        return self._run.sums.top_index

    @property
    def task(self) -> Task:
        return self._run.tasks[self.task_index]

    @cached_property
    def by_category(self) -> Bytes:
        level = self._resident + self.task.bytes.at_rise
        if self._run is not self._schedule.first:
            level = level + _net(self._schedule.first.tasks)
        if self._num_before:
            level = level + _net(self._schedule.later.tasks) + (self._num_before - 1) * self._schedule.carried
        return level + _net(self._run.tasks[: self._run.sums.top_index])

    def _net_before(self, num_before: int) -> int:
        """Bytes that have come in the first micro-batch and so many later ones."""
        net = self._schedule.first.sums.net
        if num_before:
            # What a later micro-batch leaves beside its inputs, it left when the first of them ended.
            net += self._schedule.later.sums.net + (num_before - 1) * self._schedule.carried_bytes
        return net


def _place_rows(schedule: Schedule, resident: Bytes, timing: Timing) -> list[Row]:
    def row(run: TaskRun, levels: Bytes, starts: Sequence[float], offset_ms: float) -> Row:
        return Row(
            tasks=run.tasks,
            levels=levels,
            starts_ms=tuple((offset_ms + start) for start in starts),
        )

    levels, net = _levels(schedule.first.tasks)
    base = resident
    rows = [row(schedule.first, base + levels, timing.first_starts_ms, 0.0)]
    base = base + net
    if schedule.num_later:
        levels, net = _levels(schedule.later.tasks)
        for index in sorted({*range(min(schedule.num_later, _MAX_SHOWN - 1)), schedule.num_later - 1}):
            offset_ms = timing.first_ms + index * timing.later_ms
            # What one leaves beside its inputs, it left when the one before it ended.
            here = base + index * schedule.carried + (min(index, 1) * (net - schedule.carried))
            rows.append(row(schedule.later, here + levels, timing.later_starts_ms, offset_ms))
        base = base + net + (schedule.num_later - 1) * schedule.carried
    if schedule.update.tasks:
        levels, _ = _levels(schedule.update.tasks)
        offset_ms = timing.first_ms + schedule.num_later * timing.later_ms
        rows.append(row(schedule.update, base + levels, timing.update_starts_ms, offset_ms))
    return rows


def _net(tasks: tuple[Task, ...]) -> Bytes:
    net: Bytes = np.zeros(len(CATEGORIES), dtype=np.int64)
    for task in tasks:
        net += task.bytes.net
    return net


def _levels(tasks: tuple[Task, ...]) -> tuple[Bytes, Bytes]:
    """Each task's highest point above the first one's start, and what all leave behind."""
    nets = np.array([task.bytes.net for task in tasks])
    after = nets.cumsum(axis=0)
    return after - nets + np.array([task.bytes.at_rise for task in tasks]), after[-1]


# Memory touched anew.


def estimate_fresh_ms(transient_bytes: int, *, fresh_bytes_per_s: float) -> float:
    """Time of touching a step's memory for the first time again, where the process gave it back after the step before:
    what is beyond what ``base/heap.py`` has it keep.

    transient_bytes: at their most, above what stays between steps.
    """
    return max(0, transient_bytes - KEPT_BYTES) / fresh_bytes_per_s * 1000
