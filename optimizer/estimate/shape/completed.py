"""Finds where in a step each trained tensor's gradient is complete, and so which gradients a rank lets go of there. Torch-free.

A profile lists gradients by size alone. Autograd runs backward in the reverse order of forward, and a model names its tensors
in the order of forward; so of the tensors of a part that have a gradient's size, the last that is left is taken to be its own.
Of tensors of one size it matters little which is which: ranks own about as many of each.
"""

from collections.abc import Sequence
from typing import Final

from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape
from optimizer.estimate.tasks.change import Arrival, PartName

Place = str | int
"""``head`` or ``norm``: the parts behind the blocks; or a block's number, the first of which ends with what is before it."""
_COMPLETED: Final[Table[None, "CompletedGradients"]] = Table()
_OTHERS: Final[Table[tuple[int, int], "OthersGradients"]] = Table()
_BEHIND: Final = {"head": "head_backward_first", "norm": "norm_backward_first"}


class CompletedGradients:
    """The trained tensors whose gradients are complete in each place, in order."""

    def __init__(self, compiled: CompiledShape, tensors: TensorList) -> None:
        self._waiting: dict[tuple[int, int], list[int]] = {}
        """By elements and block the tensors that no gradient was found for yet, in the model's order."""
        for index, (num_elements, block) in enumerate(zip(tensors.num_elements, tensors.blocks, strict=True)):
            self._waiting.setdefault((num_elements, block), []).append(index)
        num_blocks = len(compiled.regime.block_templates)
        self.by_place: dict[Place, tuple[int, ...]] = {}
        for place, part in _BEHIND.items():
            sizes = compiled.list_gradient_elements(part)
            self.by_place[place] = tuple(self._take(sizes, (num_blocks, -1)))
        for block in reversed(range(num_blocks)):
            sizes = compiled.list_gradient_elements(("keep", compiled.regime.block_templates[block], "backward_first"))
            self.by_place[block] = tuple(self._take(sizes, (block, -1, num_blocks)))

    @classmethod
    def find(cls, compiled: CompiledShape, tensors: TensorList) -> "CompletedGradients":
        """tensors: all that are trained."""
        return _COMPLETED.obtain(compiled, None, lambda: cls(compiled, tensors))

    def _take(self, sizes: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """The tensors of gradients of these sizes. blocks: where to look, the likeliest first; -1 stands for what is in none."""
        found = []
        for num_elements in sizes:
            for block in blocks:
                waiting = self._waiting.get((num_elements, block))
                if waiting:
                    found.append(waiting.pop())
                    break
            else:
                found.append(-1)
        return found


class OthersGradients:
    """The gradients that one rank lets go of, because others own their tensors, or because all of them leave. One object for each
    rank of a shape.
    """

    def __init__(self, compiled: CompiledShape, tensors: TensorList, *, rank: int, num_ranks: int) -> None:
        """rank: -1 lets go of all."""
        self._compiled = compiled
        owners = tensors.owners(num_ranks)
        completed = CompletedGradients.find(compiled, tensors).by_place
        self._own: dict[Place, tuple[bool, ...]] = {
            place: tuple(index < 0 or owners[index] == rank for index in indices) for place, indices in completed.items()
        }

    @classmethod
    def find(cls, compiled: CompiledShape, tensors: TensorList, *, rank: int, num_ranks: int) -> "OthersGradients":
        return _OTHERS.obtain(
            compiled, (rank, num_ranks), lambda: cls(compiled, tensors, rank=rank, num_ranks=num_ranks)
        )

    @classmethod
    def find_all(cls, compiled: CompiledShape, tensors: TensorList) -> "OthersGradients":
        """Every gradient, as where all of them leave for the host once they are added up."""
        return cls.find(compiled, tensors, rank=-1, num_ranks=1)

    def own(self, place: Place) -> tuple[bool, ...]:
        """For each gradient in order whether the rank owns its tensor; empty where it owns all."""
        flags = self._own[place]
        return () if all(flags) else flags

    def gone(self, place: Place, *, first: PartName, accumulate: PartName) -> tuple[Arrival, ...]:
        """Gradients that go in a part that adds to gradients which are there. first, accumulate: the part's two forms."""
        flags = self.own(place)
        if not flags:
            return ()
        places = self._compiled.list_completions(first, accumulate)
        return tuple(
            (after, "gradients", -num_bytes)
            for (after, num_bytes), is_own in zip(places, flags, strict=True)
            if not is_own
        )

