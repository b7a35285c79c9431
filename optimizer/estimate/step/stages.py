"""Peaks of a job's first step and its evaluations, beside the steady step. Torch-free.

First step: the optimizer's moments come to be in its update, tensor by tensor, so whatever comes before it has their room. It is
never higher than a steady step. Where gradients are consumed that is inside backward.

Evaluation (``Trainer.evaluate``): forward alone, block by block, without gradients or dropout, whatever the blocks' choices in
training; weights stream as they do there, the loss may be made in chunks. On the CPU device the inputs of all its micro-batches
are counted to its end, which a small model's evaluation can make higher than its steps.

*Not modelled*: an evaluation before the first step, which has no moments beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.categories.optimizer_state import (
    StateCosts,
    estimate_early_state_bytes,
    list_update_changes,
)
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import Brought, WeightsMove, find_brought, list_forward_moves
from optimizer.estimate.memo import Table
from optimizer.estimate.prediction import Stage, StagePeak
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.shape.logits_and_loss import list_evaluation, read_head
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.simulate import Highest, Resident, Simulation
from optimizer.estimate.step.update import UpdateExchange, UpdateInputs, list_update_tasks, update_inputs
from optimizer.estimate.tasks.moments import moments_of
from optimizer.estimate.tasks.parts import Bytes, PartBytes, sum_changes
from optimizer.estimate.tasks.tasks import single
from optimizer.hardware.machine import Machine, Processor
from optimizer.plan.activations import BlockChoice
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.plan.stages import RankStages, count_sent_at_once, list_brought
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Evaluation, Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_FIRST_UPDATES: Final[Table[UpdateInputs, TaskRun]] = Table()
_EVALUATIONS: Final[
    Table[tuple[WeightsPlan, LogitsAndLossPlan, Brought, Processor | None, tuple["EvaluatedPass", ...]], "_Evaluated"]
] = Table()


class Stages:
    """The stages of one setting, whatever its blocks do. Does not keep the profile."""

    def __init__(
        self,
        profile: Profile,
        compiled: CompiledShape,
        *,
        plan: Plan,
        workload: TrainingWorkload,
        machine: Machine,
        tensors: TensorList,
        state: StateCosts,
        schedule_first: Callable[[Sequence[BlockChoice]], Schedule] | None,
        exchange: UpdateExchange | None = None,
        rank: int = 0,
        own: RankStages | None = None,
    ) -> None:
        """The blocks' choices of ``plan`` are not read. tensors: that this rank, of several, updates. own: of a model that is
        cut.

        schedule_first: lays out a first step that consumes gradients, by what each block does; None where gradients are kept.
        """
        self._num_blocks = profile.num_blocks
        self._has_steady_step = workload.num_steps > 1
        early_bytes = estimate_early_state_bytes(tensors.list_staying(plan.optimizer_state), plan)
        self._early_bytes = early_bytes - state.device_bytes
        self._early = single("optimizer_state", self._early_bytes)
        self._schedule_first = schedule_first
        self._first_update: TaskRun | None = None
        if schedule_first is None:
            self._first_update = _first_update(
                plan=plan,
                workload=workload,
                machine=machine,
                tensors=tensors,
                state=state,
                exchange=exchange,
            )
        self._evaluation: _Evaluated | None = None
        evaluation = compiled.regime.evaluation
        if evaluation is not None:
            self._evaluation = _evaluate(
                profile, compiled, evaluation, plan=plan, workload=workload, machine=machine, rank=rank, own=own
            )

    def loaded(self, resident: Resident) -> Bytes:
        """Bytes on the device, by category, once a model is there and before its first step: no moments, no gradients."""
        early: Bytes = resident.device + self._early
        return early - single("gradients", int(early[_SLOT["gradients"]]))

    def estimate(
        self, schedule: Schedule, resident: Resident, steady: Simulation, *, choices: Sequence[BlockChoice]
    ) -> "StagePeaks":
        """schedule, resident, steady: of a steady step of a plan whose blocks do this."""
        if self._first_update is not None:
            last, update = schedule.last, self._first_update
            schedule = replace(schedule, update=update if last is None else last + update)
        if self._schedule_first is not None:
            schedule = self._schedule_first(choices)
        first = Highest(
            schedule, resident.device + self._early, resident_bytes=resident.device_bytes + self._early_bytes
        )
        return StagePeaks(
            num_blocks=self._num_blocks,
            first=first,
            steady=steady if self._has_steady_step else None,
            evaluation=None if self._evaluation is None else self._evaluation.above(resident.device),
        )


@dataclass(frozen=True, kw_only=True)
class StagePeaks:
    """Peaks of one plan's stages."""

    num_blocks: int
    first: Highest
    steady: Simulation | None
    """The simulation of a steady step; None where there is only one step."""
    evaluation: "_Evaluated | None"
    """The highest moment of an evaluation; None where the profile has traced none."""

    @property
    def highest_bytes(self) -> int:
        """The highest peak of all stages."""
        found = [self.first.num_bytes]
        if self.steady is not None:
            found.append(self.steady.device_peak_bytes)
        if self.evaluation is not None:
            found.append(int(self.evaluation.peak.sum()))
        return max(found)

    @property
    def allocated_bytes(self) -> int:
        """The most that torch has in an evaluation on the CPU device; a first step has no more than a steady one."""
        return 0 if self.evaluation is None else self.evaluation.allocated_bytes

    def list(self) -> tuple[StagePeak, ...]:
        """Stages in the order in which they come first."""
        peaks = [_stage_peak("first_step", self.first.by_category, self.first.task.describe(self.num_blocks))]
        if self.steady is not None:
            peaks.append(_stage_peak("steady_step", self.steady.peak, self.steady.peak_task.describe(self.num_blocks)))
        if self.evaluation is not None:
            peaks.append(_stage_peak("evaluation", self.evaluation.peak, self.evaluation.moment))
        return tuple(peaks)


def _stage_peak(stage: Stage, peak: Bytes, moment: str) -> StagePeak:
    return StagePeak(
        stage=stage,
        device_peak_bytes=int(peak.sum()),
        device_bytes_by_category=dict(zip(CATEGORIES, peak.tolist(), strict=True)),
        moment=moment,
    )


# The first step.


def _first_update(
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    tensors: TensorList,
    state: StateCosts,
    exchange: UpdateExchange | None,
) -> TaskRun:
    """The first step's update of gradients that are kept until then."""

    def make() -> TaskRun:
        staying = tensors.list_staying(plan.optimizer_state)
        moments = moments_of(tensors.sizes, bits=plan.optimizer_state.bits, kept=workload.kept_state)
        listed_changes = partial(list_update_changes, staying, plan, moments, is_first=True, device_kind=machine.device.kind)
        early = replace(state, list_changes=listed_changes)
        listed = list_update_tasks(
            tensors, early, plan=plan, workload=workload, machine=machine, exchange=exchange
        )
        return TaskRun(tuple(listed))

    return _FIRST_UPDATES.obtain(tensors, update_inputs(plan, workload, machine, exchange), make)


# Evaluation.


@dataclass(frozen=True, kw_only=True)
class _Evaluated:
    """The highest moment of an evaluation, above what is there all the while or with it."""

    peak: Bytes
    """Bytes by category at the peak."""
    moment: str
    allocated_bytes: int
    """Most bytes that torch has then, on the CPU device; 0 on CUDA."""

    def above(self, resident: Bytes) -> "_Evaluated":
        resident_bytes = int(resident.sum()) if self.allocated_bytes else 0
        return replace(self, peak=resident + self.peak, allocated_bytes=self.allocated_bytes + resident_bytes)


def _evaluate(
    profile: Profile,
    compiled: CompiledShape,
    evaluation: Evaluation,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    rank: int,
    own: RankStages | None,
) -> _Evaluated:
    """The highest moment of an evaluation, above what is there all the while. own: of a model that is cut."""
    brought = find_brought(profile, plan, trains_all=workload.adapter is None, rank=rank, own=own)
    processor = None
    if machine.device.kind == "cpu":
        processor = machine.processor_for(in_fp16=plan.weights.computes_in_fp16)
    num_micro_batches = workload.eval_batches * plan.batch.accumulation_steps
    passes: tuple[EvaluatedPass, ...] = (_whole_pass(profile.num_blocks, prefetch=plan.weights.prefetch),)
    if own is not None:
        num_tokens = plan.batch.micro_batch_size * workload.sequence_length
        hidden_bytes = num_tokens * profile.hidden_size * plan.weights.bytes_per_element
        passes = tuple(_list_passes(own, plan=plan, num_micro_batches=num_micro_batches, hidden_bytes=hidden_bytes))
    highest = _EVALUATIONS.obtain(
        compiled,
        (plan.weights, plan.logits_and_loss, brought, processor, passes),
        lambda: _find_highest(
            profile, compiled, evaluation, plan=plan, streamed=brought.by_block, processor=processor, passes=passes
        ),
    )
    num_inputs = num_micro_batches if inputs_pile_up(machine.device) else 1
    input_bytes = num_inputs * estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
    return highest.above(single("temporaries", input_bytes))


class EvaluatedPass(NamedTuple):
    """A forward pass of a micro-batch: of the whole model, or through one stage of it."""

    blocks: tuple[int, ...]
    moves: tuple[WeightsMove, ...]
    """Blocks whose weights come and go before each, where they stream, counted among those of the rank."""
    left: tuple[int, ...]
    """Blocks whose weights go as the last block has run."""
    held_bytes: int = 0
    """Bytes of hidden states that were sent before and are still held."""
    arriving_bytes: int = 0
    """Bytes of hidden states that come from another stage."""
    has_head: bool = True


def _whole_pass(num_blocks: int, *, prefetch: int) -> EvaluatedPass:
    moves = tuple(list_forward_moves(num_blocks, prefetch=prefetch))
    return EvaluatedPass(blocks=tuple(range(num_blocks)), moves=moves, left=(num_blocks - 1,))


def _list_passes(own: RankStages, *, plan: Plan, num_micro_batches: int, hidden_bytes: int) -> Iterator[EvaluatedPass]:
    """The last micro-batch's pass through each of a rank's stages, when most was sent and is held."""
    prefetch, keeps = plan.weights.prefetch, plan.layout.schedule == "breadth_first"
    num_together = min(num_micro_batches, plan.batch.accumulation_steps)
    most_held = count_sent_at_once(own, num_micro_batches=num_together).hidden
    num_held = 0
    present: tuple[int, ...] = ()
    left: tuple[int, ...]
    for stage in own.stages:
        if keeps:
            wanted = tuple(map(own.blocks.index, list_brought(own, stage, prefetch=prefetch, is_backward=False)))
            gone = tuple(block for block in present if block not in wanted)
            first = WeightsMove(gone=gone, coming=tuple(block for block in wanted if block not in present))
            moves = (first, *(WeightsMove(gone=(), coming=()) for _ in stage.blocks[1:]))
            present, left = wanted, ()
        else:
            moves = tuple(list_forward_moves(stage.num_blocks, prefetch=prefetch))
            left = (stage.num_blocks - 1,)
        if not stage.is_last:
            num_held = min(num_held + num_together - 1, most_held)
        yield EvaluatedPass(
            blocks=tuple(stage.blocks),
            moves=moves,
            left=left,
            held_bytes=num_held * hidden_bytes,
            arriving_bytes=0 if stage.is_first else hidden_bytes,
            has_head=stage.is_last,
        )
        if not stage.is_last:
            num_held = min(num_held + 1, most_held)


def _find_highest(
    profile: Profile,
    compiled: CompiledShape,
    evaluation: Evaluation,
    *,
    plan: Plan,
    streamed: tuple[int, ...],
    processor: Processor | None,
    passes: Sequence[EvaluatedPass],
) -> _Evaluated:
    """The highest moment above what is there all the while and the inputs. streamed: bytes of weights that come and go with each
    block that runs here. processor: the CPU device's; None on CUDA, where no kernel's scratch is counted. passes: one after the
    other, of which each leaves the weights alone.
    """
    num_blocks, templates, weights = profile.num_blocks, compiled.regime.block_templates, single("weights", 0)
    found: _Evaluated | None = None
    for each in passes:
        walk = _Walk(compiled, processor, before=weights + single("activations", each.held_bytes))
        walk.run_indexed(evaluation.prologue, "forward")
        if each.arriving_bytes:
            before = [compiled.indexed_bytes(evaluation.blocks[template]).net for template in templates[: each.blocks[0]]]
            walk.arrive(each.arriving_bytes, net=sum(before, single("activations", 0)))
        for block, move in zip(each.blocks, each.moves, strict=True):
            if streamed:
                come_bytes = sum(streamed[other] for other in move.coming) - sum(streamed[other] for other in move.gone)
                walk.come(single("weights", come_bytes))
            walk.run_indexed(evaluation.blocks[templates[block]], f"forward of block {block + 1} of {num_blocks}")
        if streamed:
            walk.come(single("weights", -sum(streamed[other] for other in each.left)))
            weights = single("weights", walk.weights_bytes)
        if each.has_head:
            walk.run(_head_bytes(profile, compiled, evaluation, plan=plan), 0, "head and loss")
        highest = walk.highest()
        if found is None or int(highest.peak.sum()) > int(found.peak.sum()):
            found = replace(highest, allocated_bytes=max(highest.allocated_bytes, 0 if found is None else found.allocated_bytes))
        else:
            found = replace(found, allocated_bytes=max(highest.allocated_bytes, found.allocated_bytes))
    assert found is not None
    return found


class _Walk:
    """A forward pass, part by part: what has come so far, and the highest moment."""

    def __init__(self, compiled: CompiledShape, processor: Processor | None, *, before: Bytes) -> None:
        self._compiled, self._processor = compiled, processor
        # Over all categories and by category; the latter is looked at only where the level is highest.
        self._level, self._come = int(before.sum()), [before]
        self._best_bytes, self._best, self._moment = 0, (1, single("weights", 0)), "forward"
        self._allocated_bytes = 0

    def run(self, part: PartBytes, allocated_rise: int, name: str) -> None:
        if self._level + part.rise > self._best_bytes:
            self._best_bytes, self._best, self._moment = self._level + part.rise, (len(self._come), part.at_rise), name
        if self._processor is not None:
            self._allocated_bytes = max(self._allocated_bytes, self._level + max(part.rise, allocated_rise))
        self.come(part.net)

    def run_indexed(self, index: int, name: str) -> None:
        compiled, processor = self._compiled, self._processor
        self.run(compiled.indexed_bytes(index), compiled.indexed_rise(index, processor) if processor else 0, name)

    def come(self, net: Bytes) -> None:
        self._level += int(net.sum())
        self._come.append(net)

    def arrive(self, num_bytes: int, *, net: Bytes) -> None:
        """Hidden states come, and take the place of those that the blocks before would have left. net: of these blocks."""
        self.run(PartBytes(net=net, rise=num_bytes, at_rise=single("activations", num_bytes)), 0, "hidden states come")

    @property
    def weights_bytes(self) -> int:
        """Weights that are there beyond those that always are."""
        return int(np.sum(self._come, axis=0)[_SLOT["weights"]])

    def highest(self) -> _Evaluated:
        num_before, at_rise = self._best
        peak = np.sum(self._come[:num_before], axis=0) + at_rise
        return _Evaluated(peak=peak, moment=self._moment, allocated_bytes=self._allocated_bytes)


def _head_bytes(profile: Profile, compiled: CompiledShape, evaluation: Evaluation, *, plan: Plan) -> PartBytes:
    num_chunks = plan.logits_and_loss.num_chunks
    if num_chunks == 1 or profile.input_bytes is not None:
        return compiled.indexed_bytes(evaluation.head)
    head = read_head(profile, compiled, weight_element_bytes=plan.weights.bytes_per_element)
    return sum_changes([("device", _SLOT[category], size) for category, size in list_evaluation(head, num_chunks)])
