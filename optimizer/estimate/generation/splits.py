"""Micro-batches of batches of many sizes: of which shapes, in how many passes and steps. Torch-free.

Arrays over sizes and numbers of micro-batches to a pass, for ``bounds/generation_floor.py`` to price all of them at once.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimizer.estimate.categories.batch import ID_BYTES
from optimizer.plan.passes.arrange import MicroBatchShape, list_passes, num_steps_of
from optimizer.workload import GenerationWorkload

Floats = NDArray[np.float64]


class Way(NamedTuple):
    """The part of a plan that decides how micro-batches run, their number and size aside; as ``list_passes`` takes it."""

    prefill_tokens: int | None
    drops_ended: bool


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Passes and steps of batches of all sizes, by number of micro-batches and size."""

    shapes: tuple[MicroBatchShape, ...]
    counts: Floats
    """Numbers of micro-batches of all passes, as [number of micro-batches, size, shape]. Where sequences ask for
    different numbers of tokens, how many share a pass may decide who shares a micro-batch (``arrange_passes``)."""
    first: Floats
    """Numbers of micro-batches of the first pass, which keeps most, likewise."""
    leader: NDArray[np.int64]
    """The shape of the first micro-batch, as [number of micro-batches, size]."""
    num_passes: Floats
    """Numbers of passes, likewise."""
    num_steps: Floats
    """Numbers of steps, likewise: in all passes, prefills among them."""
    sizes: tuple[int, ...]
    num_sequences: int
    is_even: bool
    """True where all sequences are alike, as ``GenerationWorkload.is_even``."""

    @classmethod
    def count(
        cls, workload: GenerationWorkload, sizes: tuple[int, ...], micro_batches: tuple[int, ...], way: Way
    ) -> "Splits":
        known: dict[MicroBatchShape, int] = {}
        listed = [
            [list_passes(workload, batch_size=size, num_micro_batches=number, **way._asdict()) for size in sizes]
            for number in micro_batches
        ]
        for passes in (each for row in listed for each in row):
            for shape, _ in passes:
                for each in shape:
                    known.setdefault(each, len(known))
        counts, first = np.zeros((2, len(micro_batches), len(sizes), len(known)))
        num_passes, num_steps = np.zeros((2, len(micro_batches), len(sizes)))
        for row, column in np.ndindex(num_passes.shape):
            passes = listed[row][column]
            num_passes[row, column] = sum(count for _, count in passes)
            num_steps[row, column] = sum(count * num_steps_of(shape) for shape, count in passes)
            for each in passes[0][0]:
                first[row, column, known[each]] += 1
            for shape, count in passes:
                for each in shape:
                    counts[row, column, known[each]] += count
        leader = np.array([[known[passes[0][0][0]] for passes in row] for row in listed])
        return cls(
            shapes=tuple(known),
            counts=counts,
            first=first,
            leader=leader,
            num_passes=num_passes,
            num_steps=num_steps,
            sizes=sizes,
            num_sequences=workload.num_sequences,
            is_even=workload.is_even,
        )

    def count_first(self, of_shape: NDArray[np.int64] | Floats) -> Floats:
        """Count over all micro-batches of the first pass together."""
        found: Floats = self.first @ of_shape
        return found

    def of_first(self, of_shape: NDArray[np.int64] | Floats) -> Floats:
        """Values of the first micro-batch, as [number of micro-batches, size]."""
        return np.asarray(of_shape, dtype=np.float64)[self.leader]

    @cached_property
    def new_ids(self) -> Floats:
        """Bytes of new tokens' ids, by shape."""
        return np.array([ID_BYTES * shape.batch_size * shape.num_steps for shape in self.shapes], dtype=np.float64)

    @cached_property
    def ids(self) -> Floats:
        """Bytes of ids, with those of prompts."""
        prompts = [ID_BYTES * shape.batch_size * shape.prompt_length for shape in self.shapes]
        return self.new_ids + np.array(prompts, dtype=np.float64)

    def saved_between(self, of_shape: Floats) -> Floats:
        """Amount by which a batch between one size and the next could take less than that of the first, of what a
        micro-batch takes; by size.
        """
        saved = np.zeros(len(self.sizes))
        if not self.is_even:
            return saved
        leader = self.leader[0]
        for place, (size, larger) in enumerate(pairwise(self.sizes)):
            number = -(-self.num_sequences // size)
            mean = self.num_sequences / number
            if larger > size + 1 and mean < size:
                slope = max(0.0, of_shape[leader[place + 1]] - of_shape[leader[place]]) / (larger - size)
                full = number * (of_shape[leader[place]] - (size - mean) * slope)
                saved[place] = max(0.0, float(self.counts[0, place] @ of_shape) - full)
        return saved
