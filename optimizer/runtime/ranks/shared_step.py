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

from optimizer.plan.layout import DeviceLayout
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.ownership import Ownership

_NONE = -1.0
"""Stands for the norm of a tensor without a gradient, and for labels that were not counted."""


class SharedStep:
    """The steps of one rank, with the others."""

    def __init__(
        self, ranks: Ranks, *, named: Mapping[str, nn.Parameter], layout: DeviceLayout, at_home: Collection[str] = (),
        dealt: Collection[str] = (),
    ) -> None:
        """named: the trained tensors, in the model's order. at_home: those whose one home all ranks read. dealt: those that ranks
        get from their owners when they need them.
        """
        self.ranks = ranks
        self.num_ranks = ranks.num_ranks
        self.ownership = Ownership(named, layout=layout, rank=ranks.rank)
        self._named = named
        self._names = list(named)
        self._at_home = {name for name in named if name in at_home}
        self._dealt = {name for name in named if name in dealt}

    # Before backward.

    def share_labels(self, num_labels: Sequence[int] | None, *, num_micro_batches: int) -> list[float]:
        """Share of each of this rank's micro-batches in the labels of all ranks; empty where all have as many.

        num_labels: that count, by micro-batch; None where they were not counted, on this rank or on another.
        """
        mine = [_NONE] * num_micro_batches if num_labels is None else num_labels
        counts = [count for row in self.ranks.exchange(mine) for count in row]
        if _NONE in counts or len(set(counts)) <= 1:
            return []
        return [count / sum(counts) for count in mine]

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

        A tensor's norm is its owner's; without shared state rank 0's, so that no difference between ranks can grow.
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
        """The margins of all ranks' pairs, as many of each."""
        return [margin for row in self.ranks.exchange(margins) for margin in row]

    @torch.no_grad()
    def bring_weights(self) -> None:
        """After the update, once this rank's own tensors have theirs: every owner sends new weights to the others; those that all
        ranks read at home are there when this returns; those that are dealt out come when their block runs.
        """
        if not self.ownership.is_shared:
            return
        for name, parameter in self._named.items():
            if name not in self._at_home and name not in self._dealt:
                self.ranks.broadcast_(parameter, owner=self.ownership.owner_of(name))
        self.ranks.settle()
        if self._at_home:
            self.ranks.barrier(timeout_s=self.ranks.timeout_s)

    # In an evaluation.

    def mean_loss(self, losses: Sequence[float], num_labels: Sequence[int] | None) -> float:
        """The mean over the micro-batches of all ranks, as many of each, by their labels; the same bits as on one device."""
        counted = [_NONE] * len(losses) if num_labels is None else num_labels
        rows = self.ranks.exchange([*losses, *counted])
        every_loss = [loss for row in rows for loss in row[: len(losses)]]
        counts = [count for row in rows for count in row[len(losses) :]]
        if _NONE in counts or len(set(counts)) <= 1:
            return math.fsum(every_loss) / len(every_loss)
        return math.fsum(loss * (count / sum(counts)) for loss, count in zip(every_loss, counts, strict=True))
