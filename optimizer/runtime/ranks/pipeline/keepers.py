"""Says which ranks keep which tensors of a cut model, and deals them out.

blocks       the rank whose stages run them
embeddings   the first; the head, and the norm behind the blocks: the last. Tied, an embedding that is not trained is on both.
the rest     (projections beside the blocks) stays everywhere, and is not to be trained

The owner of a tensor is the first that keeps it: it updates it, and reads it for all where one asks (``DealtHome``). A tensor
that is elsewhere is in a storage of no bytes where it is a block's, else of one number, repeated: the model's own forward still
looks things up in it, and nobody reads what it gives.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from optimizer.base.errors import InvalidModel, InvalidPlan
from optimizer.models.anatomy import Anatomy, find_anatomy
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.runtime.ranks.dealt_weights import DealtHome
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.tiers.tiers import Tiers

Keepers = Mapping[str, tuple[int, ...]]
"""By name of a parameter, the ranks that keep it, in order."""
_FIELD: Final = "plan.layout.stage_blocks"


def find_keepers(model: nn.Module, layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The keepers of every parameter. Raises InvalidModel for a model that cannot be cut, InvalidPlan where what is trained
    would be on two stages.
    """
    anatomy = find_anatomy(model)
    require_decoder(anatomy)
    found: dict[int, set[int]] = {}
    for own in layout.rank_stages:
        for index in own.blocks:
            for parameter in anatomy.blocks[index].parameters():
                found.setdefault(id(parameter), set()).add(own.rank)
    _require_one_keeper(found)
    last = layout.num_devices - 1
    for rank, modules in ((0, _before(anatomy)), (last, _behind(anatomy))):
        for module in modules:
            for parameter in module.parameters(recurse=False):
                found.setdefault(id(parameter), set()).add(rank)
    keepers = {}
    for name, parameter in model.named_parameters():
        ranks = tuple(sorted(found.get(id(parameter), range(last + 1))))
        if parameter.requires_grad and len(ranks) > 1:
            raise _trained_twice(name, is_tied=id(parameter) in found)
        keepers[name] = ranks
    return keepers


def require_decoder(anatomy: Anatomy) -> None:
    """Raise InvalidModel for a model that is no causal decoder in two halves, with all blocks in one list."""
    if type(anatomy) is not Anatomy:
        raise InvalidModel(
            f"{type(anatomy.model).__name__} is no causal decoder of a kind that can be cut over devices for training",
            field=_FIELD,
            value=type(anatomy.model).__name__,
            allowed="a causal decoder; train this model with replicated, zero1, zero2 or zero3",
        )


class StageWeights:
    """Deals out the weights of one model to the stages that keep them; they never come to another."""

    def __init__(self, ranks: Ranks, *, layout: DeviceLayout, tiers: Tiers) -> None:
        self._ranks, self._layout, self._tiers = ranks, layout, tiers
        self.keeps_streamed = layout.keeps_streamed
        """True if what streams stays until all micro-batches have used it."""
        self.own = layout.rank_stages[ranks.rank]

    def deal(
        self, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> Iterator[tuple[dict[str, nn.Parameter], dict[str, DealtHome]]]:
        """Every parameter and its home, by name: those of each block, then those that belong to none."""
        keepers = find_keepers(model, self._layout)
        owned = [{id(parameter) for parameter in block.parameters()} for block in blocks]
        inside = set().union(*owned)
        named = dict(model.named_parameters())
        groups = [{name: each for name, each in named.items() if id(each) in own} for own in owned]
        groups.append({name: each for name, each in named.items() if id(each) not in inside})
        for group in groups:
            yield group, {name: self._home(parameter, keepers[name]) for name, parameter in group.items()}

    def _home(self, parameter: nn.Parameter, keepers: tuple[int, ...]) -> DealtHome:
        return DealtHome(
            parameter, owner=keepers[0], ranks=self._ranks, tiers=self._tiers, is_here=self._ranks.rank in keepers
        )


def leave_one_number(parameter: nn.Parameter, device: torch.device) -> None:
    """Leave a parameter with its shape and one number, repeated."""
    parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _before(anatomy: Anatomy) -> list[nn.Module]:
    inside = {id(module) for block in anatomy.blocks for module in block.modules()}
    return [module for module in anatomy.backbone.modules() if isinstance(module, nn.Embedding) and id(module) not in inside]


def _behind(anatomy: Anatomy) -> list[nn.Module]:
    norms = [child for child in anatomy.backbone.children() if "norm" in type(child).__name__.lower()]
    return [*norms, *([] if anatomy.head is None else [anatomy.head])]


def _require_one_keeper(found: Mapping[int, set[int]]) -> None:
    if any(len(stages) > 1 for stages in found.values()):
        raise InvalidModel(
            "blocks of this model share weights, so it cannot be cut over devices",
            field=_FIELD,
            value="shared blocks",
            allowed="a model whose blocks have weights of their own; or one device",
        )


def _trained_twice(name: str, *, is_tied: bool) -> InvalidPlan:
    why = "it belongs to no block, and is neither embedding, norm nor head"
    if is_tied:
        why = "the embedding and the head are one (tied)"
    return InvalidPlan(
        f"{_FIELD} cuts the model, and {name} would be trained on several stages: {why}; train adapters, or use zero3",
        field=_FIELD,
        value=name,
        allowed="adapters, or plan.layout.data zero3 on a model that is not cut",
    )
