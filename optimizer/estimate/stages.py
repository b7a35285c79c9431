"""What a job's first step and its evaluations take at most, beside the steady step. Torch-free.

First step: the optimizer's moments come to be in its update, tensor by tensor, so whatever comes before it has their room. It is
never higher than a steady step. Where gradients are consumed that is inside backward.

Evaluation (``Trainer.evaluate``): forward alone, block by block, without gradients or dropout, whatever the blocks' choices in
training; weights stream as they do there, the loss may be made in chunks. On the CPU device the inputs of all its micro-batches
are counted to its end, which a small model's evaluation can make higher than its steps.

*Not modelled*: an evaluation before the first step, which has no moments beside it.
"""

from dataclasses import dataclass, replace

import numpy as np

from optimizer.categories import CATEGORIES
from optimizer.estimate.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.compiled import Bytes, CompiledShape, PartBytes, TensorList, sum_changes
from optimizer.estimate.logits_and_loss import list_evaluation, read_head
from optimizer.estimate.moments import Moments
from optimizer.estimate.optimizer_state import (
    StateCosts,
    estimate_early_state_bytes,
    list_staying,
    list_update_changes,
)
from optimizer.estimate.prediction import Prediction, Stage, StagePeak
from optimizer.estimate.schedule import build_schedule
from optimizer.estimate.simulate import Resident, Simulation, find_highest
from optimizer.estimate.tasks import Schedule, Task, single
from optimizer.estimate.update import list_update_tasks
from optimizer.estimate.weights import list_forward_moves, list_streamed_bytes
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Evaluation, Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What the estimate of the steady step has found, for those of the other stages."""

    profile: Profile
    compiled: CompiledShape
    plan: Plan
    workload: TrainingWorkload
    machine: Machine
    tensors: TensorList
    state: StateCosts
    schedule: Schedule
    resident: Resident
    simulation: Simulation


def estimate_stages(facts: StepFacts) -> tuple[StagePeak, ...]:
    """In the order in which they come first; a steady step only where there is more than one step, an evaluation only where the
    profile has traced one.
    """
    steady = facts.simulation
    peaks = [_estimate_first_step(facts)]
    if facts.workload.num_steps > 1:
        moment = steady.peak_task.describe(facts.profile.num_blocks)
        peaks.append(_stage_peak("steady_step", steady.peak, moment))
    evaluation = facts.compiled.regime.evaluation
    if evaluation is not None:
        peaks.append(_estimate_evaluation(facts, evaluation))
    return tuple(peaks)


def _stage_peak(stage: Stage, peak: Bytes, moment: str) -> StagePeak:
    return StagePeak(
        stage=stage,
        device_peak_bytes=int(peak.sum()),
        device_bytes_by_category=dict(zip(CATEGORIES, peak.tolist(), strict=True)),
        moment=moment,
    )


def with_stages(steady: Prediction, peaks: tuple[StagePeak, ...]) -> Prediction:
    """A stage that is higher than the steady step raises the interval's upper end by as much."""
    higher_bytes = max(0, *(peak.device_peak_bytes - steady.device_peak_bytes for peak in peaks))
    return replace(
        steady, peaks=peaks, device_peak_high_bytes=steady.device_peak_high_bytes + higher_bytes
    )


# The first step.


def _estimate_first_step(facts: StepFacts) -> StagePeak:
    plan, workload = facts.plan, facts.workload
    moments = Moments(bits=plan.optimizer_state.bits, num=workload.num_moments)
    early_bytes = estimate_early_state_bytes(list_staying(facts.tensors, plan), plan)
    resident = facts.resident.device + single("optimizer_state", early_bytes - facts.state.device_bytes)
    schedule = _first_schedule(facts, moments)
    peak, task = find_highest(schedule, resident)
    return _stage_peak("first_step", peak, task.describe(facts.profile.num_blocks))


def _first_schedule(facts: StepFacts, moments: Moments) -> Schedule:
    plan, workload, machine, compiled = facts.plan, facts.workload, facts.machine, facts.compiled
    if plan.gradients.choice == "consume":
        return build_schedule(
            facts.profile,
            compiled,
            plan=plan,
            workload=workload,
            machine=machine,
            tensors=facts.tensors,
            state=facts.state,
            first_moments=moments,
        )
    key = ("first update", plan.gradients, plan.optimizer_state, plan.weights, moments, workload.max_grad_norm is None)

    def update() -> tuple[Task, ...]:
        changes = list_update_changes(list_staying(facts.tensors, plan), plan, first_moments=moments)
        state = replace(facts.state, changes=tuple(changes))
        return tuple(list_update_tasks(facts.tensors, state, plan=plan, workload=workload, machine=machine))

    return replace(facts.schedule, update=compiled.keep(key, update))


# Evaluation.


def _estimate_evaluation(facts: StepFacts, evaluation: Evaluation) -> StagePeak:
    plan, workload = facts.plan, facts.workload
    key = ("evaluation", plan.weights, plan.logits_and_loss, workload.adapter is None)
    highest, moment = facts.compiled.keep(key, lambda: _find_highest(facts, evaluation))
    num_micro_batches = workload.eval_batches * plan.batch.accumulation_steps
    num_inputs = num_micro_batches if inputs_pile_up(facts.machine.device) else 1
    micro_batch_bytes = estimate_input_bytes(facts.profile, plan.batch, sequence_length=workload.sequence_length)
    input_bytes = num_inputs * micro_batch_bytes
    peak = facts.resident.device + single("temporaries", input_bytes) + highest
    return _stage_peak("evaluation", peak, moment)


def _find_highest(facts: StepFacts, evaluation: Evaluation) -> tuple[Bytes, str]:
    """Above what is there all the while and the inputs; and where."""
    profile, compiled, plan = facts.profile, facts.compiled, facts.plan
    num_blocks = profile.num_blocks
    streamed = list_streamed_bytes(profile, plan.weights, trains_all=facts.workload.adapter is None)
    moves = list_forward_moves(streamed, prefetch=plan.weights.prefetch)
    level = np.zeros(len(CATEGORIES), dtype=np.int64)
    best, moment = level, "forward"

    def run(part: PartBytes, name: str) -> None:
        nonlocal level, best, moment
        if int((level + part.at_rise).sum()) > int(best.sum()):
            best, moment = level + part.at_rise, name
        level = level + part.net

    run(compiled.indexed_bytes(evaluation.prologue), "forward")
    for block, template in enumerate(compiled.regime.block_templates):
        if streamed:
            gone_bytes, coming = moves[block]
            level = level + single("weights", sum(streamed[other] for other in coming) - gone_bytes)
        run(
            compiled.indexed_bytes(evaluation.blocks[template]), f"forward of block {block + 1} of {num_blocks}"
        )
    if streamed:
        level = level - single("weights", streamed[-1])
    run(_head_bytes(facts, evaluation), "head and loss")
    return best, moment


def _head_bytes(facts: StepFacts, evaluation: Evaluation) -> PartBytes:
    num_chunks = facts.plan.logits_and_loss.num_chunks
    if num_chunks == 1 or facts.profile.input_bytes is not None:
        return facts.compiled.indexed_bytes(evaluation.head)
    head = read_head(facts.profile, facts.compiled, weight_element_bytes=facts.plan.weights.bytes_per_element)
    return sum_changes([("device", _SLOT[category], size) for category, size in list_evaluation(head, num_chunks)])
