"""The turns of one rank in a step of a cut model, and their clock: copies and the host's work go on beside compute, also while it
waits for others. Torch-free.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from optimizer.estimate.step.clock import Clock
from optimizer.estimate.step.pipeline.schedule import StageTimes
from optimizer.estimate.step.runs import TaskRun
from optimizer.plan.devices.stages import Turn


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """One stage's part of a micro-batch, under what its blocks do."""

    begin: TaskRun
    """The tasks before the stage's first block; hidden states come."""
    forward: TaskRun
    """The blocks, and the loss on the last stage."""
    forward_again: TaskRun
    """The same of micro-batches after the first, which may find weights that it has brought."""
    left: TaskRun
    """Bytes that go as a stage that is not the last leaves the forward."""
    backward: TaskRun
    """The first micro-batch's backward, from the gradient of the last block's hidden states on."""
    accumulate: TaskRun
    """The backward of each other."""
    last: TaskRun
    """The backward of the last one, which may send off what all have added up."""
    num_micro_batches: int

    def of(self, turn: Turn) -> tuple[TaskRun, ...]:
        """The tasks of a turn, in order."""
        if turn.kind == "forward":
            return self.begin, self.forward_again if turn.micro_batch else self.forward, self.left
        if turn.micro_batch == self.num_micro_batches - 1:
            return (self.last,)
        return (self.accumulate if turn.micro_batch else self.backward,)

    def acts(self, device_kind: str) -> bool:
        """True where something is copied, or waited for, beside compute."""
        runs = (self.begin, self.forward, self.forward_again, self.backward, self.accumulate, self.last)
        return any(run.steps(device_kind).acts for run in runs)

    def times(self, device_kind: str) -> StageTimes:
        """Times of compute alone."""
        runs = (self.begin, self.forward, self.backward, self.accumulate)
        begin_ms, forward_ms, backward_ms, accumulate_ms = (sum(run.steps(device_kind).compute_ms) for run in runs)
        return StageTimes(forward_ms=begin_ms + forward_ms, backward_ms=backward_ms, accumulate_ms=accumulate_ms)


PartsByStage = Mapping[int, StageParts]
"""The parts of one rank's stages, by their numbers."""


class StagesClock:
    """The clock of one rank. Where nothing is copied a turn takes as long whenever it begins."""

    def __init__(self, parts: PartsByStage, update: TaskRun, *, device_kind: str) -> None:
        """update: the tasks that follow the last micro-batch."""
        self._parts, self._update = parts, update
        self._clock = Clock(device_kind)
        self._times: dict[int, StageTimes] = {}
        if not any(each.acts(device_kind) for each in parts.values()):
            self._times = {stage: each.times(device_kind) for stage, each in parts.items()}

    @property
    def has_work_left(self) -> bool:
        """True where the host is still busy with the step that has ended."""
        return self._clock.has_work_left

    def end_ms(self, turn: Turn, start_ms: float) -> float:
        """Time at which a turn ends that begins at ``start_ms``; turns are asked for in their order."""
        if self._times:
            return self._times[turn.stage].end_ms(turn, start_ms)
        self._clock.now_ms = start_ms
        for run in self._parts[turn.stage].of(turn):
            self._clock.run(run)
        return self._clock.now_ms

    def end_step(self, at_ms: float) -> float:
        """Time at which clipping and the update end, where all ranks have done their turns at ``at_ms``."""
        self._clock.now_ms = at_ms
        self._clock.run(self._update)
        return self._clock.now_ms

    def begin_again(self) -> None:
        """A new step, with what is under way."""
        self._clock.begin_again()


def time_stages(parts: PartsByStage, *, device_kind: str) -> StageTimes:
    """Times of a rank's micro-batches, through all of its stages, that wait for no other rank, but for their own copies."""
    clock, now_ms = StagesClock(parts, TaskRun(()), device_kind=device_kind), 0.0
    spent_ms: dict[tuple[str, int], float] = {}
    for turn in _list_alone(parts):
        end_ms = clock.end_ms(turn, now_ms)
        key = turn.kind, turn.micro_batch
        spent_ms[key] = spent_ms.get(key, 0.0) + end_ms - now_ms
        now_ms = end_ms
    return StageTimes(
        forward_ms=spent_ms["forward", 1], backward_ms=spent_ms["backward", 0], accumulate_ms=spent_ms["backward", 1]
    )


def _list_alone(parts: PartsByStage) -> Iterator[Turn]:
    """The turns of two micro-batches: one after the other through a stage that is by itself, else stage by stage."""
    stages = sorted(parts)
    if len(stages) == 1:
        yield from (Turn(kind, index, stages[0]) for index in range(2) for kind in ("forward", "backward"))
        return
    yield from (Turn("forward", index, stage) for stage in stages for index in range(2))
    yield from (Turn("backward", index, stage) for stage in stages[::-1] for index in range(2))
