"""Lets ranks decide together in an optimizer step, so that each comes to the same numbers and goes the same way.

Exchanged in a step, in this order, as float64 over the host (``group.py``): counts of labels; where gradients are consumed the
loss before backward; gradients (``reduction.py``); norms; losses; new weights on the device, of each trained tensor in the
model's order, where state is shared; of pairs their margins. Weights whose homes ranks share (``shared_homes.py``) are not sent:
the exchange of norms comes before any of them is updated, and a barrier after all are.

What is allocated: norms of all trained tensors that have a gradient, 4 bytes each, where this rank's own are (temporaries), until
clipping is done. Nothing else.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from optimizer.plan.plan import Plan
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.ownership import Ownership
from optimizer.runtime.ranks.replicas import Replica

_NONE = -1.0
"""Stands for the norm of a tensor without a gradient, and for labels that were not counted."""


class SharedStep:
    """The steps of one rank, with the others."""

    def __init__(
        self,
        ranks: Ranks,
        *,
        replica: Replica,
        named: Mapping[str, nn.Parameter],
        plan: Plan,
        at_home: Collection[str] = (),
        dealt: Collection[str] = (),
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """named: the trained tensors, in the model's order. at_home: those whose one home all ranks read. dealt: those that ranks
        get from their owners when they need them, or not at all. owners: as ``Ownership`` has them.
        """
        self.ranks, self._replica = ranks, replica
        self.num_ranks = ranks.num_ranks
        self.ownership = Ownership(named, layout=plan.layout, rank=ranks.rank, owners=owners)
        self._batches = [each.batch for each in plan.of_ranks()]
        self._num_steps = [batch.accumulation_steps for batch in self._batches]
        self._named = named
        self._names = list(named)
        self._at_home = {name for name in named if name in at_home}
        self._dealt = {name for name in named if name in dealt}

    # Before backward.

    def share_labels(self, num_labels: Sequence[int] | None, *, num_micro_batches: int) -> list[float]:
        """Share of each of this rank's micro-batches in the labels of all ranks; empty where all have as many.

        num_labels: that count, by micro-batch; None where they were not counted, on this rank or on another: then shares are of
        the sequences.
        """
        mine = [_NONE] * num_micro_batches if num_labels is None else num_labels
        counts = [count for row in self._gather(mine, by_rank=self._num_steps) for count in row]
        if _NONE in counts:
            return self.share_sequences(num_micro_batches)
        if len(set(counts)) <= 1:
            return []
        return [count / sum(counts) for count in mine]

    def share_sequences(self, num_micro_batches: int) -> list[float]:
        """Share of each of this rank's micro-batches in the sequences of all ranks; empty where all have as many."""
        sizes = self._list_sizes(num_micro_batches)
        if len({size for row in sizes for size in row}) <= 1:
            return []
        total = sum(map(sum, sizes))
        return [size / total for size in sizes[self.ranks.rank]]

    def count_all(self, num_micro_batches: int) -> int:
        """The micro-batches of all ranks. num_micro_batches: this one's."""
        return sum(map(len, self._list_sizes(num_micro_batches)))

    def _list_sizes(self, num_micro_batches: int) -> list[list[int]]:
        """By rank, the sequences of each of its micro-batches. num_micro_batches: this one's, of one step or of several."""
        num_rounds = num_micro_batches // self._num_steps[self.ranks.rank]
        return [[batch.micro_batch_size] * (num_rounds * batch.accumulation_steps) for batch in self._batches]

    def _gather(self, mine: Sequence[float], *, by_rank: Sequence[int]) -> list[list[float]]:
        """By rank, what each of them gave. by_rank: numbers of each, or what they are a common multiple of."""
        num_rounds = len(mine) // by_rank[self.ranks.rank]
        width = num_rounds * max(by_rank)
        rows = self.ranks.exchange([*mine, *[0.0] * (width - len(mine))])
        return [row[: num_rounds * count] for row, count in zip(rows, by_rank, strict=True)]

    # After backward.

    def total_of(self, loss: torch.Tensor) -> float:
        """The sum of a scalar over the ranks, in their order and in its dtype: the bits of one device's sum, where it has two
        terms.
        """
        parts = [part for (part,) in self.ranks.exchange([float(loss)])]
        # Nothing of this is to be counted: the sum is no part of what a step holds.
        with _disable_current_modes():
            total = torch.tensor(parts[0], dtype=loss.dtype)
            for part in parts[1:]:
                total += torch.tensor(part, dtype=loss.dtype)
            return float(total)

    def all_norms(self, norms: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """The norms of all tensors that have a gradient, in the model's order, from those that this rank has.

        A tensor's norm is that of its owner in the first replica; without shared state rank 0's, so that no difference between
        ranks can grow.
        """
        known = dict(zip(names, norms.tolist(), strict=True))
        rows = self.ranks.exchange([known.get(name, _NONE) for name in self._names])
        owners = [self.ownership.owner_of(name) if self.ownership.is_shared else 0 for name in self._names]
        values = [rows[owner][index] for index, owner in enumerate(owners)]
        found = np.array([value for value in values if value != _NONE], dtype=np.float32)
        everyones = torch.empty(len(found), dtype=torch.float32, device=norms.device)
        everyones.copy_(torch.from_numpy(found))
        return everyones

    def all_margins(self, margins: Sequence[float]) -> list[float]:
        """The margins of all ranks' pairs."""
        by_rank = [batch.global_batch_size for batch in self._batches]
        return [margin for row in self._gather(margins, by_rank=by_rank) for margin in row]

    @torch.no_grad()
    def bring_weights(self) -> None:
        """After the update, once this rank's own tensors have theirs: every owner sends new weights to the others in its
        replica; those that ranks read at home are there when this returns; those that are dealt out come when their block runs.
        """
        if not self.ownership.is_shared:
            return
        for name, parameter in self._named.items():
            if name not in self._at_home and name not in self._dealt:
                self._replica.ranks.broadcast_(parameter, owner=self.ownership.owner_of(name))
        self.ranks.settle()
        if self._at_home:
            self.ranks.barrier(timeout_s=self.ranks.timeout_s)

    # In an evaluation.

    def mean_loss(self, losses: Sequence[float], num_labels: Sequence[int] | None) -> float:
        """The mean over the micro-batches of all ranks, by their labels; the same bits as on one device."""
        counted = [_NONE] * len(losses) if num_labels is None else num_labels
        rows = self._gather([*losses, *counted], by_rank=[2 * count for count in self._num_steps])
        every_loss = [loss for row in rows for loss in row[: len(row) // 2]]
        counts = [count for row in rows for count in row[len(row) // 2 :]]
        if _NONE in counts:
            counts = [float(size) for row in self._list_sizes(len(losses)) for size in row]
        if len(set(counts)) <= 1:
            return math.fsum(every_loss) / len(every_loss)
        return math.fsum(loss * (count / sum(counts)) for loss, count in zip(every_loss, counts, strict=True))
