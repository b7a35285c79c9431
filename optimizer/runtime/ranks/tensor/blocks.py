"""Blocks that ranks share: what each adds to the hidden state is summed, and so is what each sends back to it.

Each rank's model has its part of every block (``formats/shared_blocks.py``). Two sums make the parts a block (Shoeybi et al.,
Megatron-LM, 2019, section 3, where they are called g and f):

forward    behind the layer that leads out of the heads, or of the neurons, its result is summed in place. Its bias, which all
           ranks have, is taken off on all but the first before. Backward passes the gradient on as it is.
backward   before the layers that lead into them, the gradient of the hidden state is summed in place, once all of them have
           added to it. Forward passes the hidden state on, as a view.

So hidden states and their gradients are the same on all ranks, and with them gradients of norms, embeddings and the head.
Tensors that all ranks have and that work inside (norms of single heads, one of an adapter's two matrices) get a part of their
gradient on each, which is summed as it is complete (``reduction.py``).

A block that is recomputed sums again what it makes again; what selective recomputation hands out is a sum already.

What is allocated: nothing, but for norms: those of all trained tensors, 4 bytes each, until clipping is done (temporaries);
where a tensor is joined, all of it twice, on the host (temporaries).
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.formats.shared_blocks import INTO, OUT_OF, is_partial
from optimizer.plan.plan import Plan
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.ownership import Ownership
from optimizer.runtime.ranks.reduction import GradientReducer
from optimizer.runtime.ranks.replicas import find_replica
from optimizer.runtime.ranks.tensor.slices import Slices, join_slices
from optimizer.runtime.tiers.homes import on_host
from optimizer.runtime.tiers.tiers import Tiers

_NONE = -1.0
"""Stands for the norm of a tensor without a gradient."""


class SharedBlocks:
    """One rank's part of every block. Call ``watch`` once, before activations are wrapped."""

    def __init__(self, ranks: Ranks, *, model: nn.Module, blocks: Sequence[nn.Module], plan: Plan) -> None:
        self.slices = Slices(model, rank=ranks.rank, num_ranks=ranks.num_ranks)
        self._ranks, self._blocks, self._plan = ranks, blocks, plan
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        partly = {name: parameter for name, parameter in self._named.items() if is_partial(name)}
        self.reducer: GradientReducer | None = None
        if partly:
            ownership = Ownership(partly, layout=plan.layout, rank=ranks.rank)
            self.reducer = GradientReducer(
                partly, ranks=ranks, replica=find_replica(ranks, plan.layout), ownership=ownership, plan=plan
            )
        self._summed = SummedResults()

    def watch(self) -> list[RemovableHandle]:
        """Hook the sums in."""
        handles: list[RemovableHandle] = []
        for block in self._blocks:
            for part, last in list_parts(block):
                handles.append(part.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(last.register_forward_hook(partial(self._leave, _bias_of(last))))
        return handles + ([] if self.reducer is None else self.reducer.watch())

    def all_norms(self, norms: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """The norms of the whole tensors that have a gradient, in the model's order, from those of this rank's parts."""
        known = dict(zip(names, norms.tolist(), strict=True))
        rows = np.array(self._ranks.exchange([known.get(name, _NONE) for name in self._named]))
        is_sliced = np.array([name in self.slices.by_name for name in self._named])
        values = np.where(is_sliced, np.sqrt((rows * np.abs(rows)).sum(axis=0).clip(min=0.0)), rows[0])
        found = values[rows[0] != _NONE].astype(np.float32)
        everyones = torch.empty(len(found), dtype=torch.float32, device=norms.device)
        everyones.copy_(torch.from_numpy(found))
        return everyones

    def join(self, name: str, held: torch.Tensor, *, tiers: Tiers) -> torch.Tensor:
        """The whole of a parameter, from this rank's part of it; on the host where ranks have parts. Of all ranks together."""
        slice_ = self.slices.of(name)
        if slice_ is None:
            return held
        with on_host(tiers, "temporaries"):
            own = held.detach().cpu().contiguous()
            parts = [own if rank == self._ranks.rank else torch.empty_like(own) for rank in range(self._ranks.num_ranks)]
            for rank, part in enumerate(parts):
                self._ranks.broadcast_on_host_(part, owner=rank)
            return join_slices(parts, slice_)

    def of_all(self, number: float) -> float:
        """A number that all ranks have come to: the first's, so that none can go another way."""
        return self._ranks.from_first([number])[0]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        hidden = hidden_of(args, kwargs)
        if not needs_gradient(hidden):
            return None
        entering: torch.Tensor = _Enter.apply(hidden, self._ranks)  # type: ignore[no-untyped-call]
        return ((entering, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entering})

    def _leave(self, bias: torch.Tensor | None, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not self._summed.add(output):
            return
        # Neither the bias nor the sum are to be seen by autograd, whose versions count what is written to.
        data = output.detach().data
        if bias is not None and not self._ranks.is_first:
            data.sub_(bias.detach())
        self._ranks.all_reduce_(data)


class _Enter(torch.autograd.Function):
    """The hidden state as it is; its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.ranks.all_reduce_(gradient)
        return gradient, None


class SummedResults:
    """Knows which results are sums: selective recomputation hands them out again."""

    def __init__(self) -> None:
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def add(self, result: torch.Tensor) -> bool:
        """Note that a result is to be a sum; False of one that is."""
        storage = result.untyped_storage()
        if self._storages.get(storage._cdata) is storage:
            return False
        self._storages[storage._cdata] = storage
        return True


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden state that a part of a block is given."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def needs_gradient(hidden: torch.Tensor) -> bool:
    """Report whether backward will come to a hidden state."""
    return torch.is_grad_enabled() and hidden.requires_grad


def list_parts(block: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A block's attention and MLP, each with the layer that leads out of it."""
    for module in block.modules():
        children = dict(module.named_children())
        last = [child for name, child in children.items() if name in OUT_OF]
        if last and children.keys() & INTO:
            yield module, last[0]


def _bias_of(layer: Any) -> torch.Tensor | None:
    """The bias of a linear layer, with an adapter or without."""
    bias: torch.Tensor | None = getattr(layer, "base_layer", layer).bias
    return bias
