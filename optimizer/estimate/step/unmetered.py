"""The real peak of a step on the CPU device, with what torch allocates and the runtime's meter does not see. Torch-free.

What that is: ``estimate/kernels``. The highest moment with it need not be the highest without it, so the step is walked through
again, task by task.
"""

from optimizer.estimate.kernels.kernel_scratch import find_kernels
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.tasks.parts import Bytes
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


def _top(run: TaskRun, *, processor: Processor) -> int:
    """The highest point above the run's start."""
    level = top = num_states = 0
    state_bytes = find_kernels(processor).random_state_bytes
    rises: dict[int, int] = {}
    """Rises by what works them out, which blocks that are alike share."""
    for task in run.tasks:
        net, rise, _, _ = task.totals
        if task.num_random_states > 0:
            num_states += 1
        if task.allocated_rise is not None:
            key = id(task.allocated_rise)
            if key not in rises:
                rises[key] = max(rise, task.allocated_rise(processor))
            rise = rises[key]
        top = max(top, level + num_states * state_bytes + rise)
        if task.num_random_states < 0:
            num_states -= 1
        level += net
    return top
