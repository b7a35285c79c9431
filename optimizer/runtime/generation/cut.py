"""Leaves of a model what one stage runs. Its forward stays the model's own; stand-ins take the place of what others hold.

blocks       of other stages give their input back. The last before the stage's own gives what came from the stage before, in a
             tensor of its own, as a block would.
embeddings   of all stages but the first are one row, repeated: what they give has the right shape, and nobody reads it.
head         of all stages but the last likewise. Tied to an embedding, it is there on the first stage and on the last.
the rest     (norms, buffers, projections beside the blocks) is small and stays on every stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.formats.two_halves import RETURN_TUPLES
from optimizer.models.anatomy import find_anatomy
from optimizer.plan.devices.stages import StageOfModel

V = TypeVar("V")
Arrive = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states of the right shape to a new tensor with those of the stage before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """Weights before and behind a model's blocks that one stage alone needs."""

    embeddings: tuple[nn.Embedding, ...]
    head: nn.Module | None

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        """The head's matrix; none where the model has no head."""
        weight = getattr(self.head, "weight", None)
        return (weight,) if isinstance(weight, nn.Parameter) else ()

    @property
    def is_tied(self) -> bool:
        """True if the head is one of the embeddings."""
        return any(weight is each.weight for weight in self.head_weights for each in self.embeddings)


def find_ends(model: nn.Module) -> Ends:
    anatomy = find_anatomy(model)
    inside = {id(module) for block in anatomy.blocks for module in block.modules()}
    embeddings = [
        module for module in model.modules() if isinstance(module, nn.Embedding) and id(module) not in inside
    ]
    head = anatomy.head if isinstance(getattr(anatomy.head, "weight", None), nn.Parameter) else None
    return Ends(embeddings=tuple(embeddings), head=head)


def cut_model(model: nn.Module, stage: StageOfModel, *, device: torch.device) -> None:
    """Leave what the stage runs, in place. device: of what stands in for embeddings and head.

    Raises InvalidModel where blocks share weights, which stages cannot.
    """
    blocks = find_anatomy(model).blocks
    _require_own_weights(blocks)
    ends = find_ends(model)
    stack = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and blocks[0] in list(module))
    in_tuple = getattr(model.config, "model_type", None) in RETURN_TUPLES
    for index, block in enumerate(blocks):
        if index not in stage.blocks:
            stack[index] = PassedOver(block, in_tuple=in_tuple)
    if ends.head is not None and not stage.is_last:
        _leave_row(ends.head, device=device)
    if not stage.is_first:
        for embedding in ends.embeddings:
            _leave_row(embedding, device=device)


def with_tied_names(model: nn.Module, reads: Mapping[str, V]) -> dict[str, V]:
    """Name what files have by every name that a tied tensor has in a whole model: on a stage not the first may be left."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    alike = {name: same for same in names.values() for name in same}
    return {other: read for name, read in reads.items() for other in alike.get(name, [name])}


def own_blocks(blocks: Sequence[nn.Module], stage: StageOfModel | None) -> tuple[nn.Module, ...]:
    """The blocks that run here: all of a model that is not cut."""
    return tuple(blocks) if stage is None else tuple(blocks[index] for index in stage.blocks)


class PassedOver(nn.Module):
    """Stands where another stage has a block."""

    def __init__(self, block: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        # A backbone may ask a block of which kind it is.
        inner = vars(nn.Module())
        self.__dict__.update({name: value for name, value in vars(block).items() if name not in inner and name != "forward"})
        self._in_tuple = in_tuple
        self.arrive: Arrive | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if self.arrive is not None:
            hidden = self.arrive(hidden)
        return (hidden,) if self._in_tuple else hidden


def _leave_row(module: nn.Module, *, device: torch.device) -> None:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    row = torch.zeros((1, weight.shape[1]), dtype=weight.dtype, device=device)
    module.weight = nn.Parameter(row.expand(weight.shape), requires_grad=False)


def _require_own_weights(blocks: Sequence[nn.Module]) -> None:
    seen: set[int] = set()
    for block in blocks:
        found = {id(parameter) for parameter in block.parameters()}
        if seen & found:
            raise InvalidModel(
                "blocks of this model share weights, so it cannot be cut over devices",
                field="plan.layout.stage_blocks",
                value="shared blocks",
                allowed="a model whose blocks have weights of their own, or one device",
            )
        seen |= found
