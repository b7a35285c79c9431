"""How high a step really goes on the CPU device, with what torch allocates and the runtime's meter does not see. Torch-free.

What that is: ``cpu_scratch.py``. The highest moment with it need not be the highest without it, so the step is walked through
again, task by task.
"""

from collections.abc import Sequence

from optimizer.estimate.cpu_scratch import RANDOM_STATE_BYTES, Point
from optimizer.estimate.parts import Bytes
from optimizer.estimate.runs import Run, Schedule
from optimizer.hardware.machine import Processor


def estimate_allocated_peak(schedule: Schedule, resident: Bytes, *, processor: Processor) -> int:
    """Bytes of a step at their most; at least what the meter counts."""
    level = int(resident.sum())
    peak = level + _top(schedule.first, processor=processor)
    level += schedule.first.sums.net
    if schedule.num_later:
        top = _top(schedule.later, processor=processor)
        carried_bytes = (schedule.num_later - 1) * int(schedule.carried.sum())
        # What a later micro-batch leaves beside its inputs, it left when the first of them ended.
        before_last = level + (schedule.later.sums.net + carried_bytes - int(schedule.carried.sum())) * (schedule.num_later > 1)
        peak = max(peak, level + top, before_last + top)
        level += schedule.later.sums.net + carried_bytes
    return max(peak, level + _top(schedule.update, processor=processor))


def highest_of(points: Sequence[Point], processor: Processor) -> int:
    """Above the part's start; 0 without points."""
    num_threads, packs_bf16 = processor
    return max(
        (
            point.num_bytes + num_threads * point.per_thread_bytes
            for point in points
            if num_threads >= point.min_threads and (packs_bf16 or not point.is_packed)
        ),
        default=0,
    )


def _top(run: Run, *, processor: Processor) -> int:
    """Above the run's start."""
    level = top = num_states = 0
    rises: dict[int, int] = {}
    """By task: a run may hold the same one many times."""
    for task in run.tasks:
        net, rise, _, _ = task.totals
        if task.num_random_states > 0:
            num_states += 1
        if task.points:
            if id(task) not in rises:
                rises[id(task)] = max(rise, highest_of(task.points, processor))
            rise = rises[id(task)]
        top = max(top, level + num_states * RANDOM_STATE_BYTES + rise)
        if task.num_random_states < 0:
            num_states -= 1
        level += net
    return top
