"""Peaks of a job's first step and its evaluations, beside the steady step. Torch-free.

First step: the optimizer's moments come to be in its update, tensor by tensor, so whatever comes before it has their room. It is
never higher than a steady step. Where gradients are consumed that is inside backward.

Evaluation (``Trainer.evaluate``): forward alone, block by block, without gradients or dropout, whatever the blocks' choices in
training; weights stream as they do there, the loss may be made in chunks. On the CPU device the inputs of all its micro-batches
are counted to its end, which a small model's evaluation can make higher than its steps.

*Not modelled*: an evaluation before the first step, which has no moments beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.categories.optimizer_state import (
    StateCosts,
    estimate_early_state_bytes,
    list_update_changes,
)
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import Brought, find_brought, list_forward_moves
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
from optimizer.plan.stages import StageOfModel
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Evaluation, Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_FIRST_UPDATES: Final[Table[UpdateInputs, TaskRun]] = Table()
_EVALUATIONS: Final[
    Table[tuple[WeightsPlan, LogitsAndLossPlan, Brought, Processor | None, StageOfModel | None], "_Evaluated"]
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
        stage: StageOfModel | None = None,
    ) -> None:
        """The blocks' choices of ``plan`` are not read. tensors: that this rank, of several, updates. stage: of a model that is
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
                profile, compiled, evaluation, plan=plan, workload=workload, machine=machine, rank=rank, stage=stage
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
    stage: StageOfModel | None,
) -> _Evaluated:
    """The highest moment of an evaluation, above what is there all the while. stage: of a model that is cut."""
    brought = find_brought(profile, plan, trains_all=workload.adapter is None, rank=rank, stage=stage)
    processor = None
    if machine.device.kind == "cpu":
        processor = machine.processor_for(in_fp16=plan.weights.computes_in_fp16)
    key = (plan.weights, plan.logits_and_loss, brought, processor, stage)
    highest = _EVALUATIONS.obtain(
        compiled,
        key,
        lambda: _find_highest(
            profile, compiled, evaluation, plan=plan, streamed=brought.by_block, processor=processor, stage=stage
        ),
    )
    num_micro_batches = workload.eval_batches * plan.batch.accumulation_steps
    num_inputs = num_micro_batches if inputs_pile_up(machine.device) else 1
    input_bytes = num_inputs * estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
    return highest.above(single("temporaries", input_bytes))


def _find_highest(
    profile: Profile,
    compiled: CompiledShape,
    evaluation: Evaluation,
    *,
    plan: Plan,
    streamed: tuple[int, ...],
    processor: Processor | None,
    stage: StageOfModel | None,
) -> _Evaluated:
    """The highest moment above what is there all the while and the inputs. streamed: bytes of weights that come and go with each
    block that runs here. processor: the CPU device's; None on CUDA,
    where no kernel's scratch is counted.
    """
    num_blocks = profile.num_blocks
    moves = list_forward_moves(streamed, prefetch=plan.weights.prefetch)
    # What has come so far, over all categories and by category; the latter is looked at only where the level is highest.
    level, come = 0, [single("weights", 0)]
    best_bytes, allocated_bytes = 0, 0
    best: tuple[int, Bytes] = (1, come[0])
    moment = "forward"

    def run(part: PartBytes, allocated_rise: int, name: str) -> None:
        nonlocal level, best_bytes, best, moment, allocated_bytes
        if level + part.rise > best_bytes:
            best_bytes, best, moment = level + part.rise, (len(come), part.at_rise), name
        if processor is not None:
            allocated_bytes = max(allocated_bytes, level + max(part.rise, allocated_rise))
        level += part.net_bytes
        come.append(part.net)

    def run_indexed(index: int, name: str) -> None:
        run(compiled.indexed_bytes(index), compiled.indexed_rise(index, processor) if processor else 0, name)

    run_indexed(evaluation.prologue, "forward")
    for block, template in enumerate(compiled.regime.block_templates):
        if stage is not None and block not in stage.blocks:
            continue
        if streamed:
            gone_bytes, coming = moves[block if stage is None else block - stage.first_block]
            come_bytes = sum(streamed[other] for other in coming) - gone_bytes
            level += come_bytes
            come.append(single("weights", come_bytes))
        run_indexed(evaluation.blocks[template], f"forward of block {block + 1} of {num_blocks}")
    if streamed:
        level -= streamed[-1]
        come.append(single("weights", -streamed[-1]))
    if stage is None or stage.is_last:
        run(_head_bytes(profile, compiled, evaluation, plan=plan), 0, "head and loss")
    num_before, at_rise = best
    return _Evaluated(peak=np.sum(come[:num_before], axis=0) + at_rise, moment=moment, allocated_bytes=allocated_bytes)


def _head_bytes(profile: Profile, compiled: CompiledShape, evaluation: Evaluation, *, plan: Plan) -> PartBytes:
    num_chunks = plan.logits_and_loss.num_chunks
    if num_chunks == 1 or profile.input_bytes is not None:
        return compiled.indexed_bytes(evaluation.head)
    head = read_head(profile, compiled, weight_element_bytes=plan.weights.bytes_per_element)
    return sum_changes([("device", _SLOT[category], size) for category, size in list_evaluation(head, num_chunks)])
