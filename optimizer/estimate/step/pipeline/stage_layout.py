"""One stage's step as tasks: its own blocks, both ends, and several micro-batches under way. Torch-free.

What a stage does before its first block is what one device does before the model's first: the prologue's storages are there, and
in their midst hidden states come. So the one trace of a model prices every cut of it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.shape.compiled import CompiledShape, PartRequest
from optimizer.estimate.shape.shared import SharedPlaces
from optimizer.estimate.step.pipeline.stage_clock import StageParts
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.schedule import END, StepLayout
from optimizer.estimate.step.update import exchange_task
from optimizer.estimate.tasks.parts import Bytes, PartBytes
from optimizer.estimate.tasks.tasks import NO_TIME, Task, move_task, single
from optimizer.plan.activations import BlockChoice, keep_elsewhere
from optimizer.plan.stages import StageOfModel, Turn, count_ahead, list_turns
from optimizer.profile.profile import Profile

_WAIT: Final = "waiting for other stages"
_NUM_ALIKE: Final = 3
"""Micro-batches behind those that are under way at once, after which a step repeats itself."""
_NOT_CARRIED: Final = [CATEGORIES.index(name) for name in ("gradients", "temporaries", "logits_and_loss")]
_NO_BYTES: Final[Bytes] = np.zeros(len(CATEGORIES), dtype=np.int64)


class StageLayout(StepLayout):
    """Puts the parts of one stage in order."""

    def __init__(self, profile: Profile, compiled: CompiledShape, *, stage: StageOfModel, **here: Any) -> None:
        """here: as ``StepLayout`` has it; ``tensors`` and ``state`` of this stage."""
        super().__init__(profile, compiled, stage=stage, **here)
        self._stage = stage
        plan, workload = self._plan, here["workload"]
        num_tokens = plan.batch.micro_batch_size * workload.sequence_length
        self.hidden_bytes = num_tokens * profile.hidden_size * plan.weights.bytes_per_element
        self._hidden = single("activations", self.hidden_bytes)
        self._gradient = single("temporaries", self.hidden_bytes)

    def parts(self, choices: Sequence[BlockChoice]) -> StageParts:
        """choices: of all blocks of the model, of which the stage's own count. Raises NotProfiled."""
        stage, own = self._stage, slice(self._stage.blocks.start, self._stage.blocks.stop)
        last = choices[-1]
        choices = keep_elsewhere(choices, stage.blocks)
        places = self._shared.place(choices, blocks=stage.blocks)
        tasks = [self._inputs_task, self._outside.task("prologue", last)]
        if not stage.is_first:
            tasks.append(self._arrival())
        begin = TaskRun(tasks)
        tasks = self._in_turn("forward", self._blocks.list_forward(choices, places.forward)[own])
        left = TaskRun(())
        if stage.is_last:
            tasks += self._freed_run(places.freed).tasks if places.freed else ()
            tasks += self._last_gone("forward", "end of the backbone", -1)
            tasks.append(self._outside.task("head", last))
        else:
            freed = self._sum_freed(places) + self._carried_on
            name = "end of the stage"
            left = TaskRun((move_task("forward", name, -freed), *self._last_gone("forward", name, -1)))
        forward = TaskRun(tasks)
        return StageParts(
            begin=begin,
            forward=forward,
            left=left,
            backward=self._backward(forward, choices, places, own, last=last, is_first=True),
            accumulate=self._backward(forward, choices, places, own, last=last, is_first=False),
        )

    def _in_turn(self, phase: str, blocks: Sequence[Task]) -> list[Task]:
        """The stage's blocks, before each its weights where they stream."""
        if not self.streamed:
            return list(blocks)
        return [task for pair in zip(self.weights_tasks(phase), blocks, strict=True) for task in pair]

    def _last_gone(self, phase: str, name: str, block: int) -> tuple[Task, ...]:
        """The weights of the block that was last go, where they stream. block: counted within the stage."""
        if not self.streamed:
            return ()
        return self._move(phase, name, (("weights", -self.streamed[block]),)).tasks

    def schedule_of(self, parts: StageParts, waited_ms: Sequence[float] = ()) -> Schedule:
        """The tasks of a step in order. waited_ms: in each turn, and once more at the end; none unless given."""
        waits = iter(waited_ms)
        tasks: list[Task] = []
        for run, turn in self._walk(parts, num_micro_batches=self.num_later + 1):
            if turn is not None and (wait_ms := next(waits, 0.0)):
                tasks.append(exchange_task(turn[0], _WAIT, wait_ms))
            tasks += run.tasks
        if wait_ms := next(waits, 0.0):
            tasks.append(exchange_task("backward", _WAIT, wait_ms))
        return Schedule(first=TaskRun(tasks), later=TaskRun(()), num_later=0, update=self.update, carried=self._carried)

    def top_bytes(self, parts: StageParts) -> int:
        """The highest point of a step above what is there between steps, or a little more: of micro-batches that are alike only
        the first few are looked at.
        """
        num_micro_batches = self.num_later + 1
        ahead = count_ahead(self._stage, num_micro_batches=num_micro_batches, schedule=self._plan.layout.schedule)
        num_seen = min(num_micro_batches, ahead + _NUM_ALIKE)
        level = top = 0
        for run, _ in self._walk(parts, num_micro_batches=num_seen):
            top = max(top, level + run.sums.top)
            level += run.sums.net
        carried_bytes = (num_micro_batches - num_seen) * int(self._carried.sum())
        return carried_bytes + max(top, level + self.update.sums.top)

    def host_top_bytes(self, parts: StageParts) -> int:
        """The highest point on the host, likewise."""
        num_micro_batches = self.num_later + 1
        ahead = count_ahead(self._stage, num_micro_batches=num_micro_batches, schedule=self._plan.layout.schedule)
        level = top = 0
        for run, _ in self._walk(parts, num_micro_batches=min(num_micro_batches, ahead + _NUM_ALIKE)):
            top = max(top, level + run.sums.beyond_top[0])
            level += run.sums.beyond[0]
        return max(top, level + self.update.sums.beyond_top[0])

    def _walk(self, parts: StageParts, *, num_micro_batches: int) -> Iterator[tuple[TaskRun, Turn | None]]:
        """The runs of a step in order; those that begin a turn with it."""
        stage, is_hidden_held, is_gradient_held = self._stage, False, False
        for turn in list_turns(stage, num_micro_batches=num_micro_batches, schedule=self._plan.layout.schedule):
            kind, index = turn
            if kind == "forward":
                yield parts.begin, turn
                if is_gradient_held:
                    yield self._gradient_gone, None
                    is_gradient_held = False
                yield parts.forward, None
                if not stage.is_last:
                    if is_hidden_held:
                        yield self._hidden_gone, None
                    yield parts.left, None
                    is_hidden_held = True
                continue
            if not stage.is_last:
                yield self._gradient_come, turn
                if is_hidden_held:
                    yield self._hidden_gone, None
                    is_hidden_held = False
            yield parts.accumulate if index else parts.backward, turn if stage.is_last else None
            if not stage.is_first:
                if is_gradient_held:
                    yield self._gradient_gone, None
                is_gradient_held = True
        if is_hidden_held:
            yield self._hidden_gone, None
        if is_gradient_held:
            yield self._gradient_gone, None

    @cached_property
    def _hidden_gone(self) -> TaskRun:
        return TaskRun((move_task("forward", "hidden states sent", -self._hidden),))

    @cached_property
    def _gradient_gone(self) -> TaskRun:
        return TaskRun((move_task("backward", "gradient sent", -self._gradient),))

    @cached_property
    def _gradient_come(self) -> TaskRun:
        return TaskRun((move_task("backward", "gradient comes", self._gradient),))

    @cached_property
    def _prologue(self) -> Bytes:
        """Bytes that the prologue makes, but for what all blocks share."""
        regime = self._compiled.regime
        shared = [self._compiled.shared_bytes(index) for index in range(len(regime.shared))]
        found: Bytes = self._outside.task("prologue", "keep").bytes.net
        return found - sum((single(category, num_bytes) for num_bytes, category in shared), _NO_BYTES)

    @cached_property
    def _carried_on(self) -> Bytes:
        """Bytes that a block leaves to the next beside its hidden states, such as what a loop over blocks holds of the
        last one. They are what the first block's forward and backward leave behind.
        """
        template = self._compiled.regime.block_templates[0]
        parts = [PartRequest(("keep", template, which)) for which in ("forward", "backward_first")]
        found: Bytes = self._prologue + sum((self._compiled.part_bytes(part).net for part in parts), _NO_BYTES) - self._hidden
        found[_NOT_CARRIED] = 0
        return found

    def _arrival(self) -> Task:
        """Hidden states come; what the prologue made is gone by then, but for what all blocks share. The stage's first block lets
        go of what the block before would have left.
        """
        net = self._hidden + self._carried_on - self._prologue
        return Task(
            phase="forward",
            block=-1,
            name="hidden states come",
            bytes=PartBytes(net=net, rise=self.hidden_bytes, at_rise=self._hidden),
            time=NO_TIME,
        )

    def _sum_freed(self, places: SharedPlaces) -> Bytes:
        found = _NO_BYTES.copy()
        for move in places.freed:
            found[move.slot] -= move.num_bytes
        return found

    def _backward(
        self,
        forward: TaskRun,
        choices: Sequence[BlockChoice],
        places: SharedPlaces,
        own: slice,
        *,
        last: BlockChoice,
        is_first: bool,
    ) -> TaskRun:
        """last: what the model's last block does."""
        # A gradient that does not stay is new in every micro-batch.
        which = "first" if is_first or self._makes_anew else "accumulate"
        blocks = self._blocks.list_backward(choices, places.backward, f"backward_{which}", is_first=is_first)[own]
        blocks.reverse()
        tasks: list[Task] = []
        if self._stage.is_last:
            tasks += [
                self._outside.task(f"head_backward_{which}", last, is_first=is_first),
                self._outside.task(f"norm_backward_{which}", last, is_first=is_first),
            ]
        tasks += [*self._in_turn("backward", blocks), *self._last_gone("backward", END, 0)]
        return self._ended(forward, TaskRun(tasks), is_first=is_first, has_loss=self._stage.is_last)

