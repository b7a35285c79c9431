"""A model that is cut over devices: which neighbouring blocks each of them has, in training and in generation alike.

The first stage also has the embeddings, the last what follows the blocks. Hidden states go from stage to stage and, in training,
their gradients back. There a device may have several stages: micro-batches then come round to it as many times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

PipelineSchedule = Literal["1f1b", "gpipe", "breadth_first"]
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class StageOfModel:
    """One stage of a model that is cut."""

    index: int
    num_stages: int
    first_block: int
    num_blocks: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.num_blocks)

    @property
    def words(self) -> str:
        """The stage's blocks for people, counted from 1: ``blocks 1 to 6``."""
        first, last = self.first_block + 1, self.first_block + self.num_blocks
        return f"block {first}" if first == last else f"blocks {first} to {last}"


def list_stages(stage_blocks: Sequence[int]) -> tuple[StageOfModel, ...]:
    """List the stages in order; none where the model is not cut."""
    firsts = (0, *accumulate(stage_blocks))
    return tuple(
        StageOfModel(index=index, num_stages=len(stage_blocks), first_block=first, num_blocks=number)
        for index, (first, number) in enumerate(zip(firsts, stage_blocks, strict=False))
    )


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """The stages on one device: one, or as many as there are rounds, each as far from the next as there are devices."""

    rank: int
    num_ranks: int
    stages: tuple[StageOfModel, ...]

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of the device's blocks, from 0, in the order of the model."""
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def is_first(self) -> bool:
        """True where the embeddings are."""
        return self.stages[0].is_first

    @property
    def is_last(self) -> bool:
        """True where the head is."""
        return self.stages[-1].is_last

    @property
    def words(self) -> str:
        """The device's blocks for people, counted from 1: ``blocks 1 to 6 and 13 to 18``."""
        runs = [stage.words.split(maxsplit=1)[1] for stage in self.stages]
        return f"block{'s' * (self.num_blocks > 1)} {' and '.join(runs)}"

    def pick(self, by_block: Sequence[_Value]) -> tuple[_Value, ...]:
        """The device's own, from values for all blocks of the model."""
        return tuple(by_block[block] for block in self.blocks)


def deal_stages(stage_blocks: Sequence[int], num_ranks: int) -> tuple[RankStages, ...]:
    """The stages of each device, which they are dealt out to in turn; none where the model is not cut."""
    stages = list_stages(stage_blocks)
    if not stages:
        return ()
    return tuple(RankStages(rank=rank, num_ranks=num_ranks, stages=stages[rank::num_ranks]) for rank in range(num_ranks))


def describe_cut(stage_blocks: Sequence[int], num_ranks: int) -> str:
    """Words for a cut: ``8 + 8 blocks``, and where devices have several stages ``32 stages of 1 block, in 16 rounds``."""
    if len(stage_blocks) == num_ranks:
        return f"{' + '.join(map(str, stage_blocks))} blocks"
    fewest, most = min(stage_blocks), max(stage_blocks)
    size = f"{most} block{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} blocks"
    return f"{len(stage_blocks)} stages of {size}, in {len(stage_blocks) // num_ranks} rounds"


class Turn(NamedTuple):
    """Forward or backward of a micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    """Number of the micro-batch, from 0."""
    stage: int = 0
    """Number of the stage, from 0."""


def count_ahead(own: RankStages, *, num_micro_batches: int, schedule: PipelineSchedule) -> int:
    """Forward passes through its last stage that a device does before its first backward, beside the one that it is of."""
    if schedule == "gpipe":
        return num_micro_batches - 1
    return min(num_micro_batches, own.num_ranks - own.rank) - 1


def list_turns(own: RankStages, *, num_micro_batches: int, schedule: PipelineSchedule) -> Iterator[Turn]:
    """The order in which a device does a step's micro-batches. Backward takes them as they came, as on one device, so that sums
    of gradients have the same bits.

    gpipe: Huang et al. 2019, section 2.3; 1f1b: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, without a flush between;
    breadth_first: Lamy-Poirier 2023 (arXiv:2211.05953), section 3, all micro-batches through a stage and then through the next;
    but through the last round as in 1f1b, so that few losses are there at once.
    """
    *rounds, last = own.stages
    yield from (Turn("forward", index, stage.index) for stage in rounds for index in range(num_micro_batches))
    ahead = count_ahead(own, num_micro_batches=num_micro_batches, schedule=schedule)
    yield from (Turn("forward", index, last.index) for index in range(ahead))
    for index in range(num_micro_batches):
        if index + ahead < num_micro_batches:
            yield Turn("forward", index + ahead, last.index)
        yield Turn("backward", index, last.index)
    yield from (Turn("backward", index, stage.index) for stage in rounds[::-1] for index in range(num_micro_batches))


def list_brought(own: RankStages, stage: StageOfModel, *, prefetch: int, is_backward: bool) -> tuple[int, ...]:
    """Blocks whose weights are on the device while a stage runs for all micro-batches, where they stream: its own, and so many of
    the stages that follow on this device, in the order in which they run. Behind the last stage's forward the others' backward
    follows.
    """
    position = own.stages.index(stage)
    forward = [] if is_backward else [block for each in own.stages[position:] for block in each.blocks]
    back = own.stages[position::-1] if is_backward else own.stages[-2::-1]
    order = dict.fromkeys((*forward, *(block for each in back for block in each.blocks[::-1])))
    return tuple(order)[: stage.num_blocks + prefetch]


class SentAtOnce(NamedTuple):
    """Most tensors that a device has sent and still holds, since they were not taken."""

    hidden: int = 1
    gradients: int = 1


def count_sent_at_once(own: RankStages, *, num_micro_batches: int) -> SentAtOnce:
    """One of each kind; but what comes round again to the first device is taken a round later, when that has done all
    micro-batches of the round, and gradients come round to the last one likewise. Other hidden states that come are then no
    sign that gradients were taken.
    """
    most = max(1, num_micro_batches - own.num_ranks + 1) if len(own.stages) > 1 else 1
    return SentAtOnce(hidden=most if own.rank == own.num_ranks - 1 else 1, gradients=most if own.rank == 0 else 1)
