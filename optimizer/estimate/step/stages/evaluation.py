"""The highest moment of a job's evaluations (``Trainer.evaluate``). Torch-free.

Forward alone, block by block, without gradients or dropout, whatever the blocks' choices in training; weights stream as they do
there, the loss may be made in chunks. On the CPU device the inputs of all its micro-batches are counted to its end, which a small
model's evaluation can make higher than its steps.

*Not modelled*: an evaluation before the first step, which has no moments beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.categories.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.categories.weights import Brought, WeightsMove, find_brought, list_forward_moves
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.shape.logits_and_loss import list_evaluation, read_head
from optimizer.estimate.tasks.parts import Bytes, PartBytes, sum_changes
from optimizer.estimate.tasks.tasks import single
from optimizer.hardware.machine import Machine, Processor
from optimizer.plan.devices.stages import RankStages, count_sent_at_once, list_brought
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Evaluation, Profile
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_EVALUATIONS: Final[
    Table[tuple[WeightsPlan, LogitsAndLossPlan, Brought, Processor | None, tuple["EvaluatedPass", ...]], "Evaluated"]
] = Table()


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The highest moment of an evaluation, above what is there all the while or with it."""

    peak: Bytes
    """Bytes by category at the peak."""
    moment: str
    allocated_bytes: int
    """Most bytes that torch has then, on the CPU device; 0 on CUDA."""

    def above(self, resident: Bytes) -> "Evaluated":
        resident_bytes = int(resident.sum()) if self.allocated_bytes else 0
        return replace(self, peak=resident + self.peak, allocated_bytes=self.allocated_bytes + resident_bytes)


def find_evaluation(
    profile: Profile,
    compiled: CompiledShape,
    evaluation: Evaluation,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    rank: int,
    own: RankStages | None,
) -> Evaluated:
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
) -> Evaluated:
    """The highest moment above what is there all the while and the inputs. streamed: bytes of weights that come and go with each
    block that runs here. processor: the CPU device's; None on CUDA, where no kernel's scratch is counted. passes: one after the
    other, of which each leaves the weights alone.
    """
    num_blocks, templates, weights = profile.num_blocks, compiled.regime.block_templates, single("weights", 0)
    found: Evaluated | None = None
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

    def highest(self) -> Evaluated:
        num_before, at_rise = self._best
        peak = np.sum(self._come[:num_before], axis=0) + at_rise
        return Evaluated(peak=peak, moment=self._moment, allocated_bytes=self._allocated_bytes)


def _head_bytes(profile: Profile, compiled: CompiledShape, evaluation: Evaluation, *, plan: Plan) -> PartBytes:
    num_chunks = plan.logits_and_loss.num_chunks
    if num_chunks == 1 or profile.input_bytes is not None:
        return compiled.indexed_bytes(evaluation.head)
    head = read_head(profile, compiled, weight_element_bytes=plan.weights.bytes_per_element)
    return sum_changes([("device", _SLOT[category], size) for category, size in list_evaluation(head, num_chunks)])
