"""One stage's turns in a step of a cut model, and their clock: copies and the host's work go on beside compute, also while it
waits for others. Torch-free.
"""

from dataclasses import dataclass
from itertools import pairwise

from optimizer.estimate.step.clock import Clock
from optimizer.estimate.step.pipeline.schedule import StageTimes
from optimizer.estimate.step.runs import TaskRun
from optimizer.plan.stages import Turn


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """One stage's part of a micro-batch, under what its blocks do."""

    begin: TaskRun
    """The tasks before the stage's first block; hidden states come."""
    forward: TaskRun
    """The blocks, and the loss on the last stage."""
    left: TaskRun
    """Bytes that go as a stage that is not the last leaves the forward."""
    backward: TaskRun
    """The first micro-batch's backward, from the gradient of the last block's hidden states on."""
    accumulate: TaskRun
    """The backward of each other."""

    def of(self, turn: Turn) -> tuple[TaskRun, ...]:
        """The tasks of a turn, in order."""
        kind, index = turn
        if kind == "forward":
            return self.begin, self.forward, self.left
        return (self.accumulate if index else self.backward,)

    def acts(self, device_kind: str) -> bool:
        """True where something is copied, or waited for, beside compute."""
        runs = (self.begin, self.forward, self.backward, self.accumulate)
        return any(run.steps(device_kind).acts for run in runs)

    def times(self, device_kind: str) -> StageTimes:
        """Times of compute alone."""
        runs = (self.begin, self.forward, self.backward, self.accumulate)
        begin_ms, forward_ms, backward_ms, accumulate_ms = (sum(run.steps(device_kind).compute_ms) for run in runs)
        return StageTimes(forward_ms=begin_ms + forward_ms, backward_ms=backward_ms, accumulate_ms=accumulate_ms)


class StageClock:
    """The clock of one stage. Where nothing is copied a turn takes as long whenever it begins."""

    def __init__(self, parts: StageParts, update: TaskRun, *, device_kind: str) -> None:
        """update: the tasks that follow the last micro-batch."""
        self._parts, self._update = parts, update
        self._clock = Clock(device_kind)
        self._times: StageTimes | None = None
        if not parts.acts(device_kind):
            self._times = parts.times(device_kind)

    @property
    def has_work_left(self) -> bool:
        """True where the host is still busy with the step that has ended."""
        return self._clock.has_work_left

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``; turns are asked for in their order."""
        if self._times is not None:
            return self._times.end_ms(turn, start_ms)
        self._clock.now_ms = start_ms
        for run in self._parts.of(turn):
            self._clock.run(run)
        return self._clock.now_ms

    def end_step(self, at_ms: float) -> float:
        """Time at which clipping and the update end, where all stages have done their turns at ``at_ms``."""
        self._clock.now_ms = at_ms
        self._clock.run(self._update)
        return self._clock.now_ms

    def begin_again(self) -> None:
        """A new step, with what is under way."""
        self._clock.begin_again()


def time_stage(parts: StageParts, *, device_kind: str) -> StageTimes:
    """Times of a stage's micro-batches that wait for no other stage, but for their own copies."""
    if not parts.acts(device_kind):
        return parts.times(device_kind)
    clock, ends_ms = StageClock(parts, TaskRun(()), device_kind=device_kind), [0.0]
    turns: tuple[Turn, ...] = (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1))
    for turn in turns:
        ends_ms.append(clock.end_ms(turn, ends_ms[-1]))
    _, backward_ms, forward_ms, accumulate_ms = (after - before for before, after in pairwise(ends_ms))
    return StageTimes(forward_ms=forward_ms, backward_ms=backward_ms, accumulate_ms=accumulate_ms)
