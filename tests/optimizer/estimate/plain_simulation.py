"""A schedule run task by task in plain Python, with nothing kept: what the simulator's sums and clock are held against."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.step.runs import Schedule
from optimizer.estimate.step.simulate import Resident
from optimizer.estimate.tasks.tasks import Task
from optimizer.estimate.tasks.transfers import BESIDE


def list_tasks(schedule: Schedule) -> Iterator[tuple[Task, int]]:
    """Every task of a step, in order, with the micro-batch it is in; -1 is the update."""
    for task in schedule.first.tasks:
        yield task, 0
    for index in range(schedule.num_later):
        for task in schedule.later.tasks:
            yield task, 1 + index
    for task in schedule.update.tasks:
        yield task, -1


def find_peak(schedule: Schedule, resident: Resident) -> tuple[dict[str, int], Task]:
    """Device bytes by category at the highest point, and the task."""
    level, best, best_task = resident.device.tolist(), None, None
    after_first = None
    for task, micro_batch in list_tasks(schedule):
        if micro_batch == 1 and after_first is None:
            after_first = level
        top = [a + b for a, b in zip(level, task.bytes.at_rise.tolist(), strict=True)]
        if best is None or sum(top) > sum(best):
            best, best_task = top, task
        level = [a + b for a, b in zip(level, task.bytes.net.tolist(), strict=True)]
    return dict(zip(CATEGORIES, best, strict=True)), best_task


def find_peak_beyond(schedule: Schedule, tier: str) -> int:
    """Above what is always there: the most that a micro-batch or the update has by itself."""
    highest = 0
    for run in (schedule.first, schedule.later, schedule.update):
        level = 0
        for task in run.tasks:
            highest = max(highest, level + getattr(task.bytes, f"{tier}_rise"))
            level += getattr(task.bytes, f"{tier}_net")
    return highest


def count_copies(schedule: Schedule) -> dict[Any, int]:
    copied: Counter[Any] = Counter()
    for task, _ in list_tasks(schedule):
        copied.update(task.copied)
    return {link: num_bytes for link, num_bytes in copied.items() if num_bytes}


class PlainClock:
    """Compute's time, and when each queue beside it is free."""

    def __init__(self, device_kind: str) -> None:
        self.beside = BESIDE[device_kind]
        self.now_ms = 0.0
        self.free_ms = dict.fromkeys(self.beside.values(), 0.0)
        self.under_way: dict[Any, Any] = {}
        self.block_end_ms: dict[Any, Any] = {}
        self.exposed_ms: Any = Counter()

    def run(self, tasks: Any) -> None:
        for task in tasks:
            for key in task.waits_for:
                if key in self.under_way:
                    self.finish(key)
            for transfer in task.arrives:
                if transfer.key not in self.under_way:
                    self.begin(transfer)
                self.finish(transfer.key)
            for transfer in task.begins:
                self.begin(transfer)
            for legs in task.leaves:
                self.work(legs)
                self.queue(legs, self.now_ms)
            if task.drains:
                for lane, queue in self.beside.items():
                    self.wait(self.free_ms[queue], lane)
                for key in list(self.under_way):
                    self.finish(key)
            self.now_ms += task.time.compute_ms
            if task.block >= 0 and task.phase == "backward":
                self.block_end_ms[task.block] = self.now_ms

    def begin(self, transfer: Any) -> None:
        begin_ms = self.block_end_ms.get(transfer.after_block, self.now_ms)
        self.under_way[transfer.key] = (*self.queue(transfer.legs, begin_ms), transfer.legs)

    def finish(self, key: Any) -> None:
        done_ms, lane, legs = self.under_way.pop(key)
        self.work(legs)
        self.wait(done_ms, lane)

    def work(self, legs: Any) -> None:
        """The legs that compute's own thread works on."""
        for lane, lane_ms in legs:
            if lane not in self.beside:
                self.exposed_ms[lane] += lane_ms
                self.now_ms += lane_ms

    def queue(self, legs: Any, begin_ms: float) -> tuple[Any, ...]:
        """The rest: each begins when the one before has, and ends no sooner."""
        done_ms, last = begin_ms, "copy_in"
        for lane, lane_ms in legs:
            if lane in self.beside:
                queue = self.beside[lane]
                begin_ms = max(begin_ms, self.free_ms[queue])
                if begin_ms + lane_ms >= done_ms:
                    done_ms, last = begin_ms + lane_ms, lane
                self.free_ms[queue] = done_ms
        return done_ms, last

    def wait(self, until_ms: float, lane: str) -> None:
        if until_ms > self.now_ms:
            self.exposed_ms[lane] += until_ms - self.now_ms
            self.now_ms = until_ms


def time_two_micro_batches(schedule: Schedule, device_kind: str) -> tuple[Any, ...]:
    """Milliseconds and what is exposed of a step with at most one later micro-batch. Where work of the host reaches into the next
    step, of the second one.
    """
    clock = PlainClock(device_kind)
    tasks = [task for task, _ in list_tasks(schedule)]
    clock.run(tasks)
    if clock.under_way:
        before_ms, clock.now_ms = clock.now_ms, 0.0
        clock.free_ms = {queue: free - before_ms for queue, free in clock.free_ms.items()}
        clock.under_way = {key: (done - before_ms, *rest) for key, (done, *rest) in clock.under_way.items()}
        clock.exposed_ms = Counter()
        clock.run(tasks)
    return clock.now_ms, {lane: lane_ms for lane, lane_ms in clock.exposed_ms.items() if lane_ms}
