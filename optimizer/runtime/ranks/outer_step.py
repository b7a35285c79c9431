"""Brings the weights of ranks together that trained alone for some steps: averages them, or takes the outer step of DiLoCo.

Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1: the difference between the weights that all had in common last and a
rank's own is taken as a gradient, averaged over the ranks by the samples that they took, and Nesterov's momentum makes the next
common weights of it; without momentum, and with a learning rate of 1, these are the mean of the ranks' weights (local SGD).
Optimizer states of the inner steps stay each rank's own. It all happens on the host, where what is kept
for it lives: weights are read there, differences cross over gloo on cards, too, and the new weights are written back. So a
synchronization takes no memory on the device.

Every rank ends with the same bits: sums are the same everywhere (``group.py``), and the rest follows from them.

What is allocated, at construction and until the end, on the host as optimizer state: ``count_host_bytes``
(``formats/outer_step.py``), not pinned. While weights are written, where those are at home on the host or their state is: a piece
of at most ``PIECE_ELEMENTS`` in their dtype, on the host as temporaries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from optimizer.formats.outer_step import (
    OUTER_LEARNING_RATE,
    OUTER_MOMENTUM,
    count_scales,
    largest_int8,
    list_buckets,
    size_buffers,
)
from optimizer.formats.transfer_sizes import SCALE_BLOCK_ELEMENTS
from optimizer.plan.plan import Plan
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.tiers.homes import HomeTensor, pieces
from optimizer.runtime.tiers.tiers import Tiers

START: Final = "start"
MOMENTUM: Final = "momentum"
_SENT: Final = {"bf16": torch.bfloat16, "int8": torch.int8}


ReadWeights = Callable[[], Mapping[str, torch.Tensor | HomeTensor]]
"""Gives the trained weights by name as updates leave them: masters, where there are any. Not to be written to."""
WriteWeights = Callable[[Mapping[str, torch.Tensor]], None]
"""Replaces trained weights, their masters too, by fp32 numbers on the host."""


@dataclass(frozen=True, kw_only=True)
class _Span:
    """The part of one tensor that is in a bucket."""

    name: str
    of_tensor: slice
    of_bucket: slice


class OuterStep:
    """The synchronizations of one rank."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        *,
        plan: Plan,
        ranks: Ranks,
        tiers: Tiers,
        read: ReadWeights,
        write: WriteWeights,
    ) -> None:
        """named: the trained tensors, in the model's order, with the same numbers on every rank. plan: as this rank carries it
        out.
        """
        self._ranks, self._read, self._write, self._layout = ranks, read, write, plan.layout
        self._share = plan.batch.global_batch_size / sum(each.batch.global_batch_size for each in plan.of_ranks())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self._sizes = {name: parameter.numel() for name, parameter in named.items()}
        self._num_elements = sum(self._sizes.values())
        are_finer = plan.weights.master_bytes_per_element > 0
        self._coarse = {name: p.dtype for name, p in named.items() if p.dtype != torch.float32 and not are_finer}
        """Tensors whose weights are coarser than what all had in common last, by their dtypes."""
        buffers = size_buffers(
            self._num_elements, sync_format=self._layout.sync_format, are_rounded=bool(self._coarse)
        )

        def keep(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return tiers.host_buffer(size, dtype=dtype, category="optimizer_state", pinned=False)

        self._start = keep(self._num_elements)
        self._momentum = keep(self._num_elements).zero_() if self._layout.sync_rule == "nesterov" else None
        self._values = keep(buffers.num_values).zero_()
        self._sent = keep(buffers.num_sent, _SENT[self._layout.sync_format]) if buffers.num_sent else None
        self._scales = keep(buffers.num_scales) if buffers.num_scales else None
        self._rounded = keep(buffers.num_rounded, next(iter(self._coarse.values()))) if self._coarse else None
        self.steps_alone = 0
        """Steps since the last synchronization."""
        self.begin_anew()

    @property
    def is_due(self) -> bool:
        return self.steps_alone >= self._layout.sync_every

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take the weights as they are, which must be the same on all ranks, as those that all have in common."""
        held, start = self._read(), 0
        for name, size in self._sizes.items():
            self._start[start : start + size].copy_(_flat(held[name]))
            start += size
        if self._momentum is not None:
            self._momentum.zero_()
        self.steps_alone = 0

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give all ranks the same weights, of what each made of the last. Raises RankLost."""
        held = self._read()
        for bucket in list_buckets(self._num_elements):
            values = self._values[: count_scales(len(bucket)) * SCALE_BLOCK_ELEMENTS]
            values[len(bucket) :].zero_()
            own, start = values[: len(bucket)], self._start[bucket.start : bucket.stop]
            for span in self._spans(bucket):
                own[span.of_bucket].copy_(_flat(held[span.name])[span.of_tensor])
                self._subtract(start[span.of_bucket], own[span.of_bucket], span)
            self._average_(values, len(bucket))
            if self._momentum is None:
                start.sub_(own)
                continue
            momentum = self._momentum[bucket.start : bucket.stop]
            momentum.mul_(OUTER_MOMENTUM).add_(own)
            own.add_(momentum, alpha=OUTER_MOMENTUM)
            start.add_(own, alpha=-OUTER_LEARNING_RATE)
        self._write(self._by_name(self._start))
        self.steps_alone = 0

    # Checkpoints, which are written between a synchronization and the next step.

    def export_state(self) -> dict[str, torch.Tensor]:
        """The live tensors by ``<parameter>//<what>``; common weights only where they are finer than the model's own."""
        found: dict[str, torch.Tensor] = {}
        if self._momentum is not None:
            found |= {f"{name}//{MOMENTUM}": value for name, value in self._by_name(self._momentum).items()}
        if self._coarse:
            found |= {f"{name}//{START}": value for name, value in self._by_name(self._start).items()}
        return found

    @torch.no_grad()
    def import_state(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint whose weights the model has; anew where it has no such state."""
        self.begin_anew()
        for kind, kept in ((MOMENTUM, self._momentum), (START, self._start)):
            for name, value in (self._by_name(kept) if kept is not None else {}).items():
                if f"{name}//{kind}" in stored:
                    value.copy_(stored[f"{name}//{kind}"])

    # Helpers.

    def _average_(self, values: torch.Tensor, count: int) -> None:
        """Make differences, the first ``count`` of which count, those of all ranks by their samples."""
        values.mul_(self._share)
        if self._sent is None:
            self._sum_(values[:count])
            return
        sent = self._sent[: len(values)]
        if self._scales is None:
            sent.copy_(values)
            self._sum_(sent[:count])
            values.copy_(sent)
            return
        blocks, most = values.view(-1, SCALE_BLOCK_ELEMENTS), largest_int8(self._ranks.num_ranks)
        scales = self._scales[: len(blocks)]
        torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1, out=scales)
        self._ranks.all_reduce_on_host_(scales, largest=True, num_steps=self._layout.sync_every)
        # Where nothing has changed the largest is 0, and 0 / 0 is no number.
        scales.div_(most).clamp_(min=torch.finfo(torch.float32).tiny)
        blocks.div_(scales[:, None]).round_()
        sent.copy_(values)
        self._sum_(sent[:count])
        values.copy_(sent)
        blocks.mul_(scales[:, None])

    def _sum_(self, tensor: torch.Tensor) -> None:
        self._ranks.all_reduce_on_host_(tensor, num_steps=self._layout.sync_every)

    def _subtract(self, start: torch.Tensor, own: torch.Tensor, span: _Span) -> None:
        """Make a tensor's weights their difference from those that all had in common, as the model had these."""
        if self._rounded is not None and span.name in self._coarse:
            rounded = self._rounded[span.of_bucket]
            start = rounded.copy_(start)
        for begin, end in pieces(len(own)):
            torch.sub(start[begin:end], own[begin:end], out=own[begin:end])

    def _spans(self, bucket: range) -> Iterator[_Span]:
        first = 0
        for name, size in self._sizes.items():
            begin, end = max(first, bucket.start), min(first + size, bucket.stop)
            if begin < end:
                of_bucket = slice(begin - bucket.start, end - bucket.start)
                yield _Span(name=name, of_tensor=slice(begin - first, end - first), of_bucket=of_bucket)
            first += size

    def _by_name(self, kept: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of what is kept for all elements."""
        parts = torch.split(kept, list(self._sizes.values()))
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _flat(held: torch.Tensor | HomeTensor) -> torch.Tensor:
    tensor = held.detach() if isinstance(held, torch.Tensor) else held.load()
    return tensor.reshape(-1)
