"""Counts the sums of hidden states that ranks which share each block make in a micro-batch, where a step of theirs is traced."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from optimizer.plan.activations import BlockChoice
from optimizer.profile.meta_ops.meta_ops import Ops
from optimizer.profile.profile import BlockSums
from optimizer.profile.sizes import Shape
from optimizer.profile.trace.training_step import Subject, trace_step
from optimizer.runtime.ranks.tensor.blocks import SummedResults, hidden_of, list_parts, needs_gradient

_RUN_AGAIN: Final[tuple[BlockChoice, ...]] = ("recompute", "selective")
_RESULT, _GRADIENT = "result", "gradient"


def count_sums(subject: Subject, shape: Shape, choices: Sequence[BlockChoice], *, num_ranks: int, ops: Ops) -> BlockSums:
    """The sums of a model that is one of so many ranks'. choices: those that are traced."""
    kept = _count(subject, shape, "keep", ops)
    last = len(subject.blocks) - 1
    again = {
        choice: _count(subject, shape, choice, ops)[_RESULT, last] - kept[_RESULT, last]
        for choice in _RUN_AGAIN
        if choice in choices
    }
    return BlockSums(
        num_ranks=num_ranks,
        forward=kept[_RESULT, last],
        backward=kept[_GRADIENT, last],
        first_backward=kept[_GRADIENT, 0],
        again={choice: number for choice, number in again.items() if number},
    )


def _count(subject: Subject, shape: Shape, choice: BlockChoice, ops: Ops) -> Counter[tuple[str, int]]:
    """By block, the results and the gradients that a micro-batch sums."""
    found: Counter[tuple[str, int]] = Counter()
    with _watching(subject.blocks, found):
        trace_step(subject, shape, choice, num_micro_batches=1, ops=ops, watches_holds=False)
    return found


@contextmanager
def _watching(blocks: Sequence[nn.Module], found: Counter[tuple[str, int]]) -> Iterator[None]:
    summed, handles = SummedResults(), []

    def enter(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runs_again = found[_RESULT, index] >= num_parts[index]
        found[_GRADIENT, index] += needs_gradient(hidden_of(args, kwargs)) and not runs_again

    def leave(index: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        found[_RESULT, index] += summed.add(output)

    num_parts = [len(list(list_parts(block))) for block in blocks]
    for index, block in enumerate(blocks):
        for part, last in list_parts(block):
            handles.append(part.register_forward_pre_hook(partial(enter, index), with_kwargs=True))
            handles.append(last.register_forward_hook(partial(leave, index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
