"""Attention as one node of the graph, which saves what the projections made and nothing of its own.

Kinds that lay keys and values beside each block of queries make copies several times their size, and linear attention makes sums
of outer products; autograd would save all of these for backward, and rotated queries and keys besides. Here backward makes them
again. Forward and backward take a few heads at a time, those that share keys, so that what they make is small as well. The
number of runs follows from the heads alone: the ops are the same for every length.

*Not for* attention with dropout, whose random numbers would have to be drawn again, nor for keys that a cache wants rotated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

Attend = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Attention from columns of queries, keys and values, [batch, length, heads * head_dim] each: [batch, length, query columns]."""
Prepare = Callable[[torch.Tensor, Sequence[torch.Tensor]], Attend]
"""Makes what all runs share, for a tensor that was projected (its length, dtype and device) and constants."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    num_heads: int
    num_groups: int
    """Heads of keys and values."""
    head_dim: int
    groups_at_once: int = 1
    """A divisor of num_groups."""

    def runs(self, *, is_fused: bool) -> Iterator["_Run"]:
        wide, narrow = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        num_runs = self.num_groups // self.groups_at_once
        firsts = (0, wide, wide + narrow) if is_fused else (0, 0, 0)
        for index in range(num_runs):
            sizes = [width // num_runs for width in (wide, narrow, narrow)]
            places = [slice(first + index * size, first + (index + 1) * size) for first, size in zip(firsts, sizes, strict=True)]
            yield _Run(columns=tuple(places), result=slice(index * sizes[0], (index + 1) * sizes[0]))


class _Run(NamedTuple):
    columns: tuple[slice, ...]
    """One each for queries, keys and values."""
    result: slice

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of queries, keys and values. tensors: three, or one that holds all."""
        sources = tensors if len(tensors) == len(self.columns) else [tensors[0]] * len(self.columns)
        return [source[..., place] for source, place in zip(sources, self.columns, strict=True)]


def attend_by_runs(
    projected: Sequence[torch.Tensor], *, constants: Sequence[torch.Tensor], heads: Heads, prepare: Prepare
) -> torch.Tensor:
    """Attend head by head; [batch, length, num_heads * head_dim].

    projected: [batch, length, columns], three or one. constants: tensors without gradients that ``prepare`` is given.
    """
    result: torch.Tensor = _AttentionNode.apply(heads, prepare, len(projected), *projected, *constants)  # type: ignore[no-untyped-call]
    return result


class _AttentionNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Heads, prepare: Prepare, num_projected: int, *tensors: torch.Tensor) -> torch.Tensor:
        kind = tensors[0].device.type
        ctx.heads, ctx.prepare, ctx.num_projected = heads, prepare, num_projected
        dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.make_autocast = partial(torch.autocast, kind, dtype=dtype, enabled=is_on, cache_enabled=False)
        ctx.save_for_backward(*tensors)
        projected, constants = tensors[:num_projected], tensors[num_projected:]
        attend = prepare(projected[0], constants)
        result = None
        for run in heads.runs(is_fused=len(projected) == 1):
            part = attend(run.cut(projected))
            if result is None:
                # Only attention itself knows in which dtype it ends under autocast.
                result = part.new_empty((*part.shape[:-1], heads.num_heads * heads.head_dim))
            result[..., run.result].copy_(part)
            del part
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        projected, constants = tensors[: ctx.num_projected], tensors[ctx.num_projected :]
        attend = ctx.prepare(projected[0], constants)
        gradients = [torch.empty_like(tensor) for tensor in projected]
        for run in ctx.heads.runs(is_fused=len(projected) == 1):
            inputs = [view.detach().requires_grad_() for view in run.cut(projected)]
            with torch.enable_grad(), ctx.make_autocast():
                result = attend(inputs)
            parts = torch.autograd.grad(result, inputs, gradient[..., run.result])
            del result
            for place, part in zip(run.cut(gradients), parts, strict=True):
                place.copy_(part)
            del parts, part
        return None, None, None, *gradients, *(None for _ in constants)
