"""Sums each gradient over the ranks as it is complete, before the plan does with it what it says (``step/gradients.py``).

It works in hooks that run before those of ``Gradients``, so that what is clipped, moved or consumed is the sum of all ranks:

gradients kept, replicated   summed on every rank in the last micro-batch; on CUDA beside the rest of backward.
gradients kept, zero1        summed on the owner in the last micro-batch; the others drop theirs there and then.
gradients kept, zero2        the same in each micro-batch: the owner's sum so far and the others' latest are the sum of all.
moved to the host, consumed  as zero2 in each micro-batch; replicated: on every rank.

With several replicas (``replicas.py``) that is the sum of one of them, on its owner there. Owners of the same tensor sum theirs
at once: in the last micro-batch where gradients are kept, else in each.

A gradient is dropped before its hook returns, so a rank that owns nothing of a block holds one gradient of it at a time.
What is allocated: nothing.

Ranks must sum the same tensors in the same order, or numbers that do not belong together would be added. In the first micro-batch
that is summed they compare notes tensor by tensor; from then on each compares with what it did then. A model whose parts run or
not depending on its data is refused with RanksDiffer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import RanksDiffer
from optimizer.plan.plan import Plan
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.ownership import Ownership
from optimizer.runtime.ranks.replicas import Replica

_END: Final = -1
"""Sent in place of a tensor's index once backward is through."""


class GradientReducer:
    """The sums of one rank's gradients with the others'."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], *, ranks: Ranks, replica: Replica, ownership: Ownership, plan: Plan
    ) -> None:
        """named: the trained tensors, in the model's order."""
        self._named = named
        self._names = list(named)
        self._ranks, self._replica = ranks, replica
        self._ownership = ownership
        self._leaves_in_each = plan.gradients.choice != "keep"
        self._in_each = self._leaves_in_each or plan.layout.reduces_each_micro_batch
        self._is_beside_backward = plan.gradients.choice == "keep" and not ownership.is_shared
        self._order: list[int] = []
        """Indices of the tensors, as they were summed the first time."""
        self._is_known = False
        self._position = 0
        self._is_summed = self._is_last = False

    def watch(self) -> list[RemovableHandle]:
        """Hook in; call before ``Gradients.watch``."""
        return [
            parameter.register_post_accumulate_grad_hook(partial(self._reduce, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._named.values())
        ]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Before each backward."""
        self._is_summed, self._is_last = is_last or self._in_each, is_last
        self._position = 0

    def end_micro_batch(self) -> None:
        """After it. Raises RanksDiffer where a gradient was left out of the sums."""
        if not self._is_summed:
            return
        self._is_summed = False
        if not self._is_known:
            self._compare(_END)
            self._is_known = True
        elif self._position < len(self._order):
            raise _differ(f"{self._names[self._order[self._position]]} had no gradient in this micro-batch, unlike before")
        summed = set(self._order)
        for index, parameter in enumerate(self._named.values()):
            if parameter.grad is not None and index not in summed:
                raise _differ(f"{self._names[index]} had a gradient in an earlier micro-batch, not in the last")

    def settle(self) -> None:
        """Before gradients are read: the compute stream waits for all sums. Raises RankLost."""
        self._ranks.settle()

    def _reduce(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self._is_summed:
            return
        self._check(index)
        with torch.no_grad():
            if not self._ownership.is_shared:
                self._ranks.all_reduce_(gradient, waits=not self._is_beside_backward)
                return
            name = self._names[index]
            self._replica.ranks.reduce_(gradient, owner=self._ownership.owner_of(name))
            if not self._ownership.owns(name):
                parameter.grad = None
            elif self._replica.twins is not None and (self._is_last or self._leaves_in_each):
                self._replica.twins.all_reduce_(gradient)

    def _check(self, index: int) -> None:
        if not self._is_known:
            self._compare(index)
            self._order.append(index)
            return
        if self._position >= len(self._order) or self._order[self._position] != index:
            raise _differ(f"the gradient of {self._names[index]} was complete in another order than in the first micro-batch")
        self._position += 1

    def _compare(self, index: int) -> None:
        found = [int(other) for (other,) in self._ranks.exchange([index])]
        if len(set(found)) > 1:
            shown = ", ".join(f"rank {rank}: {self._show(other)}" for rank, other in enumerate(found))
            raise _differ(f"gradients are complete in another order on each rank ({shown})")

    def _show(self, index: int) -> str:
        return "none left" if index == _END else self._names[index]


def _differ(what: str) -> RanksDiffer:
    return RanksDiffer(
        f"{what}; the ranks of a run must sum the same gradients in the same order",
        hint="A model whose parts run or not depending on its data trains on one device: set plan.layout.num_devices to 1.",
    )
