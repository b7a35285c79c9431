"""The parts of any ``nn.Module``: its repeated blocks, what comes before and after them, and the loss that the caller gives.

Blocks are run one after the other, each once in a forward pass, and take the hidden states as their first argument. What runs
between two of them belongs to the first. Where there are none, the whole module is one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.models.anatomy import Anatomy, AtHidden, Loss, hidden_state_of

Inputs = torch.Tensor | tuple[torch.Tensor, ...]
"""One tensor, or those that the module is called with, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainAnatomy(Anatomy):
    """A module that is called with the caller's inputs. ``backbone`` is its last block; what follows is the head."""

    @property
    def is_chunkable(self) -> bool:
        return False

    def run(self, ids: Inputs, *, labels: Any, masks: Any, at_hidden: AtHidden) -> torch.Tensor:
        """The module's output. ids: its input, or a tuple of its inputs; numbers with a point are cast to the weights' dtype."""
        inputs = ids if isinstance(ids, tuple) else (ids,)
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        cast = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]

        def at_end(module: nn.Module, args: Any, output: Any) -> None:
            at_hidden(hidden_state_of(output))

        handle = self.backbone.register_forward_hook(at_end, prepend=True)
        try:
            output: torch.Tensor = self.model(*cast)
        finally:
            handle.remove()
        return output

    def compute_logits(self, result: torch.Tensor) -> torch.Tensor:
        """They are there already: whatever the loss takes."""
        return result


def plain_anatomy(module: nn.Module, *, loss: Loss, blocks: Sequence[str] | None = None) -> PlainAnatomy:
    """The anatomy that a profile of the module was made with, for ``apply`` and ``Trainer``.

    loss: from the module's output and the labels to a scalar. blocks: names of blocks, or of containers of blocks, in the order
    in which forward runs them; None looks for the largest ``ModuleList`` or ``Sequential`` of like modules; empty for none.
    Raises InvalidModel for names that the module does not have.
    """
    found = _find_like(module) if blocks is None else [block for name in blocks for block in _blocks_named(module, name)]
    whole = tuple(found) or (module,)
    return PlainAnatomy(model=module, backbone=whole[-1], blocks=whole, head=None, loss=_looked_up(loss))


def _looked_up(loss: Loss) -> Loss:
    """A function of torch's by its name at each call: a profile is traced with other functions in their places."""
    name = getattr(loss, "__name__", "")
    if getattr(F, name, None) is not loss:
        return loss

    def call(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(F, name)(output, labels)
        return found

    return call


def check_trains_all(module: nn.Module) -> None:
    """Raises InvalidModel where some parameter is frozen."""
    frozen = next((name for name, parameter in module.named_parameters() if not parameter.requires_grad), None)
    if frozen is not None:
        raise InvalidModel(
            f"the module's parameter {frozen} is frozen; of a plain module every parameter must be trained",
            field="module",
            value=frozen,
            allowed="parameters that require gradients",
        )


def _find_like(module: nn.Module) -> list[nn.Module]:
    """Children of the list with the most parameters of those whose children are all of one class; nothing where there is none."""
    lists = [
        list(child)
        for child in module.modules()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and len({type(each) for each in child}) == 1
    ]
    trained = [found for found in lists if all(any(True for _ in block.parameters()) for block in found)]
    return max(trained, key=_num_elements, default=[])


def _num_elements(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _blocks_named(module: nn.Module, name: str) -> list[nn.Module]:
    try:
        found = module.get_submodule(name)
    except AttributeError as error:
        known = [known for known, _ in module.named_children()]
        raise InvalidModel(
            f"blocks name {name!r}, which the module does not have; its children: {', '.join(known) or 'none'}",
            field="blocks",
            value=name,
            allowed=known,
        ) from error
    return list(found) if isinstance(found, nn.ModuleList | nn.Sequential) else [found]
