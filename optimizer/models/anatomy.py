"""The parts of a model that a step needs: its blocks in the order forward runs them, how to come to the logits, and where a
forward pass ends. The one place that knows them.

Two kinds of model. A causal decoder is run in two halves, backbone and head, so that the head can be cut into chunks
(``Anatomy``). Any other model runs its own forward, and tells by a hook when its last hidden state is there
(``WholeAnatomy``): encoders whose head transforms before it projects, an encoder with a decoder, a module whose loss the
caller gives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

AtHidden = Callable[[torch.Tensor], None]
"""Called with the last hidden state as soon as it is there."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a model's output and the labels to a scalar."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """A causal decoder in two halves: ``backbone(input_ids=..., use_cache=False).last_hidden_state``, then the head.

    Belongs to the model as it is: made afresh after adapters were attached.
    """

    model: nn.Module
    backbone: nn.Module
    """Its forward ends when the last hidden state is there and every block has run: where hooks on the whole go."""
    blocks: tuple[nn.Module, ...]
    """In the order forward runs them; a second stack (a decoder's, after an encoder's) follows the first."""
    head: nn.Module | None
    """The output projection, which alone need not be the whole head; None where the model has none."""
    loss: Loss | None = None
    """Of the logits and the labels; None: mean cross-entropy over the labels that count."""

    @property
    def is_chunkable(self) -> bool:
        """Whether the head is a plain projection of what ``run`` returns, so that the loss can be made in chunks."""
        return type(self.head) is nn.Linear and self.loss is None

    @property
    def soft_cap(self) -> float | None:
        """Logits are bounded by it smoothly (Gemma 2)."""
        cap: float | None = getattr(getattr(self.model, "config", None), "final_logit_softcapping", None)
        return cap

    def run(
        self, ids: torch.Tensor, *, labels: torch.Tensor, masks: Mapping[str, torch.Tensor], at_hidden: AtHidden
    ) -> torch.Tensor:
        """The model but for its head: the last hidden state, after ``at_hidden`` saw it.

        labels: what some models make their decoder's inputs of. masks: ``attention_mask``, or nothing.
        """
        hidden: torch.Tensor = self.backbone(input_ids=ids, use_cache=False, **masks).last_hidden_state
        at_hidden(hidden)
        return hidden

    def compute_logits(self, result: torch.Tensor) -> torch.Tensor:
        """Logits from what ``run`` returned, with the soft cap where there is one.

        result: [..., hidden_size]; any leading shape, so a chunk of a sequence is as good as the whole.
        """
        assert self.head is not None
        logits: torch.Tensor = self.head(result)
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeAnatomy(Anatomy):
    """A model that is run by its own forward, in which ``backbone`` ends with the last hidden state."""

    inputs: Callable[[torch.Tensor, torch.Tensor], Mapping[str, torch.Tensor]]
    """From ids and labels to the arguments of forward."""
    output: Callable[[Any], torch.Tensor]
    """From what forward returns to the logits, or to whatever ``loss`` takes."""

    @property
    def is_chunkable(self) -> bool:
        return False

    def run(
        self, ids: torch.Tensor, *, labels: torch.Tensor, masks: Mapping[str, torch.Tensor], at_hidden: AtHidden
    ) -> torch.Tensor:
        """The whole model: its logits."""

        def at_end(module: nn.Module, args: Any, output: Any) -> None:
            at_hidden(hidden_state_of(output))

        handle = self.backbone.register_forward_hook(at_end)
        try:
            return self.output(self.model(**self.inputs(ids, labels), **masks))
        finally:
            handle.remove()

    def compute_logits(self, result: torch.Tensor) -> torch.Tensor:
        """They are there already."""
        return result


def find_anatomy(model: nn.Module) -> Anatomy:
    """Raises LookupError where the blocks cannot be told from the rest."""
    backbone: nn.Module = model.get_decoder()  # type: ignore[operator]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    return Anatomy(model=model, backbone=backbone, blocks=tuple(_find_stack(model, backbone)), head=head)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Those of ``find_anatomy``."""
    return list(find_anatomy(model).blocks)


def hidden_state_of(output: Any) -> torch.Tensor:
    """The hidden states in what a block, a stack or a backbone returns: of a tuple or an output object the first tensor."""
    if isinstance(output, torch.Tensor):
        return output
    first = output[0] if isinstance(output, tuple | list) else getattr(output, "last_hidden_state", None)
    if not isinstance(first, torch.Tensor):
        raise LookupError(f"a {type(output).__name__} begins with no hidden states")
    return first


def _find_stack(model: nn.Module, backbone: nn.Module) -> nn.ModuleList:
    """The one list of modules directly under the backbone that is as long as the model is deep."""
    num_blocks = model.config.num_hidden_layers  # type: ignore[union-attr]
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList) and len(child) == num_blocks]
    if len(lists) != 1:
        raise LookupError(
            f"{type(model).__name__} has {len(lists)} lists of {num_blocks} blocks under its backbone, not one"
        )
    return lists[0]
