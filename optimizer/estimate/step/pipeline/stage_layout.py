"""The step of one rank of a cut model as tasks: its stages' blocks, their ends, and several micro-batches under way. Torch-free.

What a stage does before its first block is what one device does before the model's first: the prologue's storages are there, and
in their midst hidden states come. So the one trace of a model prices every cut of it.

Weights that stream come and go with each micro-batch, block by block; with ``breadth_first`` once for all of them, as their stage
begins, and the next stage's with them.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.categories.weights import WeightsMove
from optimizer.estimate.shape.compiled import CompiledShape, PartRequest
from optimizer.estimate.shape.completed import OthersGradients
from optimizer.estimate.shape.shared import SharedPlaces
from optimizer.estimate.step.block_tasks import BlockTasks
from optimizer.estimate.step.outside_tasks import OutsideTasks
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.step.pipeline.stage_clock import PartsByStage, StageParts
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.schedule import END, StepLayout
from optimizer.estimate.step.update import exchange_task
from optimizer.estimate.tasks.parts import Bytes, PartBytes
from optimizer.estimate.tasks.tasks import NO_TIME, Task, move_task, single
from optimizer.plan.activations import BlockChoice, keep_elsewhere
from optimizer.plan.devices.stages import (
    RankStages,
    StageOfModel,
    Turn,
    count_ahead,
    count_sent_at_once,
    list_brought,
    list_turns,
)
from optimizer.profile.profile import Profile

_WAIT: Final = "waiting for other stages"
_NUM_ALIKE: Final = 3
"""Micro-batches behind those that are under way at once, after which a step repeats itself."""
_NOT_CARRIED: Final = [CATEGORIES.index(name) for name in ("gradients", "temporaries", "logits_and_loss")]
_NO_BYTES: Final[Bytes] = np.zeros(len(CATEGORIES), dtype=np.int64)


class StagesLayout(StepLayout):
    """Puts the parts of one rank's stages in order."""

    def __init__(self, profile: Profile, compiled: CompiledShape, *, own: RankStages, **here: Any) -> None:
        """here: as ``StepLayout`` has it; ``tensors`` and ``state`` of this rank."""
        super().__init__(profile, compiled, own=own, **here)
        self._own = own
        plan, workload = self._plan, here["workload"]
        num_tokens = plan.batch.micro_batch_size * workload.sequence_length
        self.hidden_bytes = num_tokens * profile.hidden_size * plan.weights.bytes_per_element
        self._hidden = single("activations", self.hidden_bytes)
        self._gradient = single("temporaries", self.hidden_bytes)
        self._keeps_streamed = plan.layout.schedule == "breadth_first"
        self._last_blocks, self._last_outside = self._blocks, self._outside
        if self._keeps_streamed and plan.gradients.choice == "host":
            self._add_up_on_device(profile)

    def _add_up_on_device(self, profile: Profile) -> None:
        """Have gradients stay until the last micro-batch has added to them, and leave then."""
        compiled, machine, compress = self._compiled, self._machine, self._plan.activations.compress
        self._makes_anew = False
        stays = PartPrices.find_adding_up(compiled, machine, leaves=False)
        self._blocks = BlockTasks.find(stays, compress=compress)
        self._outside = OutsideTasks.find(profile, stays, plan=self._plan)
        leaves = PartPrices.find_adding_up(compiled, machine, leaves=True)
        others = OthersGradients.find_all(compiled, list_tensors(profile))
        self._last_blocks = BlockTasks.find(leaves, compress=compress, others=others)
        self._last_outside = OutsideTasks.find(profile, leaves, plan=self._plan, others=others)

    def parts(self, choices: Sequence[BlockChoice]) -> PartsByStage:
        """choices: of all blocks of the model, of which the rank's own count. Raises NotProfiled."""
        return {stage.index: self._parts_of(stage, choices) for stage in self._own.stages}

    def _parts_of(self, stage: StageOfModel, choices: Sequence[BlockChoice]) -> StageParts:
        blocks = slice(stage.blocks.start, stage.blocks.stop)
        last = choices[-1]
        choices = keep_elsewhere(choices, stage.blocks)
        places = self._shared.place(choices, blocks=stage.blocks)
        is_next_round = stage is not self._own.stages[0]
        tasks = [] if is_next_round and self.inputs_stay else [self._inputs_task]
        tasks.append(self._outside.task("prologue", last))
        if not stage.is_first:
            tasks.append(self._arrival())
        begin = TaskRun(tasks)
        ran = self._blocks.list_forward(choices, places.forward)[blocks]
        end: list[Task] = []
        left = TaskRun(())
        if stage.is_last:
            end += self._freed_run(places.freed).tasks if places.freed else ()
            end += self._last_gone("forward", "end of the backbone", -1)
            end.append(self._outside.task("head", last))
        else:
            freed = self._sum_freed(places) + self._carried_on
            name = "end of the stage"
            left = TaskRun((move_task("forward", name, -freed), *self._last_gone("forward", name, -1)))
        forward = forward_again = TaskRun([*self._in_turn("forward", stage, ran), *end])
        if self.streamed and self._keeps_streamed:
            forward_again = TaskRun([*ran, *end])
        accumulate = last_backward = self._backward(stage, forward, choices, places, last=last, is_first=False)
        if self._last_blocks is not self._blocks:
            last_backward = self._backward(stage, forward, choices, places, last=last, is_first=False, leaves=True)
        return StageParts(
            begin=begin,
            forward=forward,
            forward_again=forward_again,
            left=left,
            backward=self._backward(stage, forward, choices, places, last=last, is_first=True),
            accumulate=accumulate,
            last=last_backward,
            num_micro_batches=self.num_later + 1,
        )

    def _in_turn(self, phase: str, stage: StageOfModel, blocks: Sequence[Task]) -> list[Task]:
        """A stage's blocks in the order in which they run, before each its weights where they stream."""
        if not self.streamed:
            return list(blocks)
        if self._keeps_streamed:
            return [task for block in blocks for task in (*self._brought_before.get((phase, block.block), ()), block)]
        return [task for pair in zip(self.weights_tasks(phase), blocks, strict=True) for task in pair]

    @cached_property
    def _brought_before(self) -> dict[tuple[str, int], tuple[Task, ...]]:
        """By phase and block, the task before the block's first micro-batch: as a stage begins, the weights of blocks that are
        not wanted go and those that are missing come; later blocks wait for theirs.
        """
        found: dict[tuple[str, int], tuple[Task, ...]] = {}
        present: list[int] = []
        under_way = set[int]()
        for phase in ("forward", "backward"):
            is_backward = phase == "backward"
            for stage in self._own.stages[:: -1 if is_backward else 1]:
                wanted = list_brought(self._own, stage, prefetch=self._plan.weights.prefetch, is_backward=is_backward)
                gone = [block for block in present if block not in wanted]
                coming = [block for block in wanted if block not in present]
                under_way = under_way.difference(gone).union(coming)
                present = [*(block for block in present if block in wanted), *coming]
                for block in stage.blocks[::-1] if is_backward else stage.blocks:
                    if gone or coming or block in under_way:
                        found[phase, block] = (self._bring(phase, block, gone, coming, is_there=block not in under_way),)
                    under_way.discard(block)
                    gone, coming = [], []
        return found

    def _bring(self, phase: str, block: int, gone: Sequence[int], coming: Sequence[int], *, is_there: bool) -> Task:
        """Blocks by their numbers in the model."""
        place = self._own.blocks.index
        move = WeightsMove(gone=tuple(map(place, gone)), coming=tuple(map(place, coming)))
        return self.make_weights_task(phase, place(block), move, is_there=is_there, comes_for="stage")

    def _last_gone(self, phase: str, name: str, block: int) -> tuple[Task, ...]:
        """The weights of the block that was last go, where they stream, unless they stay for the next micro-batch. block: counted
        within the stage.
        """
        if not self.streamed or self._keeps_streamed:
            return ()
        return self._move(phase, name, (("weights", -self.streamed[block]),)).tasks

    @cached_property
    def _all_gone(self) -> TaskRun:
        """At the end of a step the weights go that stayed for all micro-batches of its last stage: the first of the rank."""
        first = self._own.stages[0]
        wanted = list_brought(self._own, first, prefetch=self._plan.weights.prefetch, is_backward=True)
        num_bytes = sum(self.streamed[self._own.blocks.index(block)] for block in wanted)
        return self._move("backward", "end of the step", (("weights", -num_bytes),))

    def schedule_of(self, parts: PartsByStage, waited_ms: Sequence[float] = ()) -> Schedule:
        """The tasks of a step in order. waited_ms: in each turn, and once more at the end; none unless given."""
        waits = iter(waited_ms)
        tasks: list[Task] = []
        for run, turn in self._walk(parts, num_micro_batches=self.num_later + 1):
            if turn is not None and (wait_ms := next(waits, 0.0)):
                tasks.append(exchange_task(turn.kind, _WAIT, wait_ms))
            tasks += run.tasks
        if wait_ms := next(waits, 0.0):
            tasks.append(exchange_task("backward", _WAIT, wait_ms))
        return Schedule(first=TaskRun(tasks), later=TaskRun(()), num_later=0, update=self.update, carried=self._carried)

    def top_bytes(self, parts: PartsByStage) -> int:
        """The highest point of a step above what is there between steps, or a little more: of micro-batches that are alike only
        the first few are looked at.
        """
        num_micro_batches, num_seen = self.num_later + 1, self._num_seen
        level = top = 0
        for run, _ in self._walk(parts, num_micro_batches=num_seen):
            top = max(top, level + run.sums.top)
            level += run.sums.net
        carried_bytes = (num_micro_batches - num_seen) * int(self._carried.sum())
        return carried_bytes + max(top, level + self.update.sums.top)

    def host_top_bytes(self, parts: PartsByStage) -> int:
        """The highest point on the host, likewise."""
        level = top = 0
        for run, _ in self._walk(parts, num_micro_batches=self._num_seen):
            top = max(top, level + run.sums.beyond_top[0])
            level += run.sums.beyond[0]
        return max(top, level + self.update.sums.beyond_top[0])

    @property
    def _num_seen(self) -> int:
        num_micro_batches = self.num_later + 1
        if len(self._own.stages) > 1:
            return num_micro_batches
        ahead = count_ahead(self._own, num_micro_batches=num_micro_batches, schedule=self._plan.layout.schedule)
        return min(num_micro_batches, ahead + _NUM_ALIKE)

    def _walk(self, parts: PartsByStage, *, num_micro_batches: int) -> Iterator[tuple[TaskRun, Turn | None]]:
        """The runs of a step in order; those that begin a turn with it."""
        own, hidden_held, gradients_held = self._own, 0, 0
        at_once = count_sent_at_once(own, num_micro_batches=num_micro_batches)
        for turn in list_turns(own, num_micro_batches=num_micro_batches, schedule=self._plan.layout.schedule):
            stage, here = own.stages[turn.stage // own.num_ranks], parts[turn.stage]
            begin, *rest = here.of(turn)
            if turn.kind == "forward":
                forward, left = rest
                yield begin, turn
                if at_once.gradients == 1:
                    yield from self._let_go(self._gradient_gone, gradients_held)
                    gradients_held = 0
                yield forward, None
                if not stage.is_last:
                    if hidden_held == at_once.hidden:
                        yield self._hidden_gone, None
                        hidden_held -= 1
                    yield left, None
                    hidden_held += 1
                continue
            if not stage.is_last:
                yield self._gradient_come, turn
                yield from self._let_go(self._hidden_gone, hidden_held)
                hidden_held = 0
            yield begin, turn if stage.is_last else None
            if not stage.is_first:
                if gradients_held == at_once.gradients:
                    yield self._gradient_gone, None
                    gradients_held -= 1
                gradients_held += 1
        yield from self._let_go(self._hidden_gone, hidden_held)
        yield from self._let_go(self._gradient_gone, gradients_held)
        if self.streamed and self._keeps_streamed:
            yield self._all_gone, None

    def _let_go(self, gone: TaskRun, count: int) -> Iterator[tuple[TaskRun, Turn | None]]:
        yield from ((gone, None) for _ in range(count))

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
        stage: StageOfModel,
        forward: TaskRun,
        choices: Sequence[BlockChoice],
        places: SharedPlaces,
        *,
        last: BlockChoice,
        is_first: bool,
        leaves: bool = False,
    ) -> TaskRun:
        """last: what the model's last block does. leaves: whether gradients go that were added up until then."""
        of_blocks, outside = (self._last_blocks, self._last_outside) if leaves else (self._blocks, self._outside)
        # A gradient that does not stay is new in every micro-batch.
        which = "first" if is_first or self._makes_anew else "accumulate"
        listed = of_blocks.list_backward(choices, places.backward, f"backward_{which}", is_first=is_first)
        blocks = listed[stage.blocks.start : stage.blocks.stop][::-1]
        tasks: list[Task] = []
        if stage.is_last:
            tasks += [
                outside.task(f"head_backward_{which}", last, is_first=is_first),
                outside.task(f"norm_backward_{which}", last, is_first=is_first),
            ]
        brings = is_first or not self._keeps_streamed
        tasks += [*(self._in_turn("backward", stage, blocks) if brings else blocks), *self._last_gone("backward", END, 0)]
        return self._ended(forward, TaskRun(tasks), is_first=is_first, has_loss=stage.is_last)

