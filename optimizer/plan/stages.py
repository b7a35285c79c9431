"""A model that is cut over devices: which neighbouring blocks each of them has, in training and in generation alike.

The first stage also has the embeddings, the last what follows the blocks. Hidden states go from stage to stage and, in training,
their gradients back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

PipelineSchedule = Literal["1f1b", "gpipe"]


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


Turn = tuple[Literal["forward", "backward"], int]
"""Forward or backward of a micro-batch, by its number from 0."""


def count_ahead(stage: StageOfModel, *, num_micro_batches: int, schedule: PipelineSchedule) -> int:
    """Forward passes that a stage does before its first backward, beside the one that this backward is of."""
    if schedule == "gpipe":
        return num_micro_batches - 1
    return min(num_micro_batches, stage.num_stages - stage.index) - 1


def list_turns(stage: StageOfModel, *, num_micro_batches: int, schedule: PipelineSchedule) -> Iterator[Turn]:
    """The order in which a stage does a step's micro-batches. Backward takes them as they came, as on one device, so that sums of
    gradients have the same bits.

    gpipe: Huang et al. 2019, section 2.3; 1f1b: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.1, without a flush between.
    """
    ahead = count_ahead(stage, num_micro_batches=num_micro_batches, schedule=schedule)
    yield from (("forward", index) for index in range(ahead))
    for index in range(num_micro_batches):
        if index + ahead < num_micro_batches:
            yield "forward", index + ahead
        yield "backward", index
