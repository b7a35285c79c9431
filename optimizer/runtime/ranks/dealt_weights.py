"""Weights of blocks that are on one rank's device alone between uses (``zero3``): whose each is, and how the others get it.

A tensor that is trained is kept by the rank that updates it (``ownership.py``); what is frozen is dealt out by bytes, a packed
matrix with its scales. ``step/weights.py`` asks for the tensors of a block before it runs and drops them after, on the ranks that
do not keep them. All ranks ask in the same order, since each runs the same blocks; the one that keeps a tensor sends it, straight
from where it lies. It changes a tensor only between steps or, where gradients are consumed, in the backward of its block, when
nobody will ask for it again before the next forward.

What is allocated: nothing here. What a rank gets from others is in the storage that the parameter has anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from optimizer.formats.ownership import deal_frozen
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.runtime.layers.quantized_linear import list_base_tensors
from optimizer.runtime.ranks.group import Arriving, Ranks
from optimizer.runtime.ranks.ownership import Ownership
from optimizer.runtime.tiers.copies import Copy, as_bytes
from optimizer.runtime.tiers.homes import OffDeviceBytes, on_host
from optimizer.runtime.tiers.tiers import Tiers

NOTHING: Final = Arriving(None)


class DealtHome:
    """One tensor that one rank keeps."""

    def __init__(
        self, parameter: nn.Parameter, *, owner: int, ranks: Ranks, tiers: Tiers, is_here: bool | None = None
    ) -> None:
        """is_here: unless given, on the owner alone."""
        self.num_bytes = parameter.numel() * parameter.dtype.itemsize
        self.is_here = owner == ranks.rank if is_here is None else is_here
        """True on a rank that keeps it."""
        self.owner = owner
        self.stored: OffDeviceBytes | None = None
        """Its bytes off the device, where the owner keeps it there."""
        self._parameter, self._ranks, self._tiers = parameter, ranks, tiers

    @property
    def stays(self) -> bool:
        """True on a rank whose parameter is whole at all times."""
        return self.is_here and self.stored is None

    def fetch(self, target: torch.Tensor) -> Arriving | Copy:
        """Start to send or to receive all of it, over the parameter's own numbers. Asked for by all ranks in the same order; of
        what the owner keeps off its device, by the owner alone.
        """
        if self.stored is not None:
            return self.stored.fetch(target)
        return self._ranks.begin_broadcast(as_bytes(target), owner=self.owner)

    def read(self) -> torch.Tensor:
        """All bytes in host memory, on every rank; not to be written to. Asked for by all ranks in the same order."""
        with on_host(self._tiers, "temporaries"):
            if self.stored is not None:
                data = self.stored.read()
            else:
                data = as_bytes(self._parameter.data).cpu() if self.is_here else torch.empty(self.num_bytes, dtype=torch.uint8)
        self._ranks.broadcast_on_host_(data, owner=self.owner)
        return data


class DealtWeights:
    """Deals out the weights of one model's blocks."""

    def __init__(self, ranks: Ranks, *, layout: DeviceLayout, tiers: Tiers) -> None:
        """ranks: of one replica."""
        self._ranks, self._layout, self._tiers = ranks, layout, tiers

    def deal(self, model: nn.Module, by_block: Sequence[Mapping[str, nn.Parameter]]) -> list[dict[str, DealtHome]]:
        """The homes of these parameters, by name. by_block: those that belong to one block alone, in the model's order."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        ownership = Ownership(trained, layout=self._layout, rank=self._ranks.rank)
        owners = {name: ownership.owner_of(name) for name in trained}
        units = _list_frozen(model, by_block)
        sizes = [[sum(_num_bytes(named[name]) for name in unit) for unit in listed] for named, listed in units]
        for (_, listed), dealt in zip(units, deal_frozen(sizes, num_ranks=self._layout.num_sharing), strict=True):
            owners |= {name: owner for unit, owner in zip(listed, dealt, strict=True) for name in unit}
        return [
            {
                name: DealtHome(parameter, owner=owners[name], ranks=self._ranks, tiers=self._tiers)
                for name, parameter in named.items()
            }
            for named in by_block
        ]


_Units = list[tuple[str, ...]]
"""Names of parameters that stay together."""


def _list_frozen(
    model: nn.Module, by_block: Sequence[Mapping[str, nn.Parameter]]
) -> list[tuple[Mapping[str, nn.Parameter], _Units]]:
    """By block what is frozen: a packed matrix with its scales, and all else by itself."""
    sources = {source: base.sources for base in list_base_tensors(model) for source in base.sources}
    return [
        (
            named,
            list(dict.fromkeys(sources.get(name, (name,)) for name, parameter in named.items() if not parameter.requires_grad)),
        )
        for named in by_block
    ]


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.dtype.itemsize
