"""Runs a schedule: bytes over time per category, the peak and what is in memory at it, the time of each lane and of the step.

On the CPU device copies run on the one thread that computes. On CUDA they run in order on a stream of their own;
compute waits for
a copy back that is not done when its block's backward begins, and while the last micro-batch still has copies under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.estimate.compiled import Bytes
from optimizer.estimate.schedule import Schedule, Task


@dataclass(frozen=True, kw_only=True)
class Clock:
    """When each task of a micro-batch begins, and what it all took."""

    starts_ms: tuple[float, ...]
    total_ms: float
    compute_ms: float
    copy_out_ms: float
    copy_in_ms: float

    @property
    def exposed_ms(self) -> float:
        """Not negative: the step is never shorter than its compute."""
        return max(0.0, self.total_ms - self.compute_ms)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of tasks placed in the step: where it begins, in time and in bytes."""

    tasks: tuple[Task, ...]
    starts_ms: tuple[float, ...]
    base: Bytes
    """Device bytes by category before the first task."""
    levels: Bytes
    """[task, category]: device bytes at each task's highest point."""
    host_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A whole step."""

    rows: tuple[Row, ...]
    peak: Bytes
    """Device bytes by category at the peak."""
    peak_task: Task
    peak_at: tuple[int, int]
    """Row and task."""
    host_peak_bytes: int
    step_ms: float
    compute_ms: float
    copy_out_ms: float
    copy_in_ms: float
    exposed_copy_ms: float


def simulate(schedule: Schedule, *, resident: Bytes, copies_overlap: bool, time_factor: float = 1.0) -> Simulation:
    """resident: device bytes by category that are there before the step and after it (weights, optimizer state)."""
    first = _run_clock(schedule.first, copies_overlap=copies_overlap, factor=time_factor)
    later = _run_clock(schedule.later, copies_overlap=copies_overlap, factor=time_factor)
    update = _run_clock(schedule.update, copies_overlap=False, factor=time_factor)
    rows = [_place(schedule.first, first, base=resident, offset_ms=0.0, copies_overlap=copies_overlap)]
    base = resident + _net(schedule.first)
    now_ms = first.total_ms
    if schedule.num_later:
        net = _net(schedule.later)
        for index in _shown(schedule.num_later):
            offset_ms = now_ms + index * later.total_ms
            rows.append(
                _place(
                    schedule.later, later, base=base + index * net, offset_ms=offset_ms, copies_overlap=copies_overlap
                )
            )
        base = base + schedule.num_later * net
        now_ms += schedule.num_later * later.total_ms
    rows.append(_place(schedule.update, update, base=base, offset_ms=now_ms, copies_overlap=False))
    tops = [row.levels.sum(axis=1) for row in rows]
    best_row = max(range(len(rows)), key=lambda index: (int(tops[index].max()), -index))
    best_task = int(tops[best_row].argmax())
    return Simulation(
        rows=tuple(rows),
        peak=rows[best_row].levels[best_task],
        peak_task=rows[best_row].tasks[best_task],
        peak_at=(best_row, best_task),
        host_peak_bytes=max(row.host_peak_bytes for row in rows),
        step_ms=now_ms + update.total_ms,
        compute_ms=first.compute_ms + schedule.num_later * later.compute_ms + update.compute_ms,
        copy_out_ms=first.copy_out_ms + schedule.num_later * later.copy_out_ms,
        copy_in_ms=first.copy_in_ms + schedule.num_later * later.copy_in_ms,
        exposed_copy_ms=first.exposed_ms + schedule.num_later * later.exposed_ms,
    )


_MAX_SHOWN = 6
"""Later micro-batches that are laid out for the timeline; they are alike."""


def _shown(num_later: int) -> list[int]:
    """The last, where inputs have piled up highest, and a few before it."""
    step = max(1, num_later // _MAX_SHOWN)
    return sorted({*range(0, num_later, step), num_later - 1})


def _net(tasks: Sequence[Task]) -> Bytes:
    return np.sum([task.bytes.net for task in tasks], axis=0)  # type: ignore[no-any-return]


def _place(tasks: tuple[Task, ...], clock: Clock, *, base: Bytes, offset_ms: float, copies_overlap: bool) -> Row:
    nets = np.array([task.bytes.net for task in tasks])
    before = base + np.concatenate([np.zeros_like(nets[:1]), nets.cumsum(axis=0)[:-1]])
    levels = before + np.array([task.bytes.at_rise for task in tasks])
    host_nets = np.array([task.bytes.host_net for task in tasks])
    host_before = host_nets.cumsum() - host_nets
    host_peak_bytes = int((host_before + np.array([task.bytes.host_rise for task in tasks])).max())
    return Row(
        tasks=tasks,
        starts_ms=tuple(offset_ms + start for start in clock.starts_ms),
        base=base,
        levels=levels,
        host_peak_bytes=host_peak_bytes,
    )


def _run_clock(tasks: Sequence[Task], *, copies_overlap: bool, factor: float) -> Clock:
    now_ms = copies_free_ms = 0.0
    ready_ms: dict[int, float] = {}
    starts: list[float] = []
    for task in tasks:
        compute_ms, out_ms, in_ms = (
            task.time.compute_ms * factor,
            task.time.copy_out_ms * factor,
            task.time.copy_in_ms * factor,
        )
        starts.append(now_ms)
        if not copies_overlap:
            now_ms += compute_ms + out_ms + in_ms
            continue
        begin_ms = now_ms
        if in_ms:
            if task.block not in ready_ms:
                copies_free_ms = max(copies_free_ms, begin_ms) + in_ms
                ready_ms[task.block] = copies_free_ms
            begin_ms = max(begin_ms, ready_ms[task.block])
        if task.fetches >= 0:
            copies_free_ms = max(copies_free_ms, begin_ms) + _copy_in_ms(tasks, task.fetches) * factor
            ready_ms[task.fetches] = copies_free_ms
        now_ms = begin_ms + compute_ms
        if out_ms:
            # A block's copies out start as its tensors appear, at the earliest with the block itself.
            copies_free_ms = max(copies_free_ms, begin_ms) + out_ms
    return Clock(
        starts_ms=tuple(starts),
        total_ms=now_ms,
        compute_ms=sum(task.time.compute_ms for task in tasks) * factor,
        copy_out_ms=sum(task.time.copy_out_ms for task in tasks) * factor,
        copy_in_ms=sum(task.time.copy_in_ms for task in tasks) * factor,
    )


def _copy_in_ms(tasks: Sequence[Task], block: int) -> float:
    return next(task.time.copy_in_ms for task in tasks if task.block == block and task.phase == "backward")
