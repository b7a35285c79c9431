"""Peaks of a job's stages that a step decides: the first step, a steady one and evaluations (``evaluation.py``). Torch-free.

First step: the optimizer's moments come to be in its update, tensor by tensor, so whatever comes before it has their room. It is
never higher than a steady step. Where gradients are consumed that is inside backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.optimizer_state import (
    StateCosts,
    estimate_early_state_bytes,
    list_update_changes,
)
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.memo import Table
from optimizer.estimate.prediction import Stage, StagePeak
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.simulate import Highest, Resident, Simulation
from optimizer.estimate.step.stages.evaluation import Evaluated, find_evaluation
from optimizer.estimate.step.update import UpdateExchange, UpdateInputs, list_update_tasks, update_inputs
from optimizer.estimate.tasks.moments import moments_of
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.tasks.tasks import single
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import BlockChoice
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_FIRST_UPDATES: Final[Table[UpdateInputs, TaskRun]] = Table()


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
        self._evaluation: Evaluated | None = None
        evaluation = compiled.regime.evaluation
        if evaluation is not None:
            self._evaluation = find_evaluation(
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
    evaluation: Evaluated | None
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
