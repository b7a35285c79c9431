"""The parts of a model that a step needs: its blocks in the order forward runs them, how to come to the logits, and where a
forward pass ends. The one place that knows them.

Two kinds of model. A causal decoder is run in two halves, backbone and head, so that the head can be cut into chunks
(``Anatomy``). Any other model runs its own forward, and a hook reports when its last hidden state is there
(``WholeAnatomy``): encoders whose head transforms before it projects, an encoder with a decoder, a module whose loss the
caller gives.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from optimizer.formats.two_halves import IN_TWO_HALVES
from optimizer.models.soft_cap import soften

AtHidden = Callable[[torch.Tensor], None]
"""Called with the last hidden state as soon as it is there."""

_PARTS = ("text_config", "vision_config", "audio_config")
"""Parts of a config that mark a model of more than text."""
_SMALLEST_STACK = 0.02
"""Share of the largest stack's numbers under which a list of modules is no stack."""

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
    """Loss of the logits and the labels; None: mean cross-entropy over the labels that count."""

    @property
    def is_chunkable(self) -> bool:
        """True if the head is a plain projection of what ``run`` returns, so that the loss can be made in chunks."""
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
        return logits if self.soft_cap is None else soften(logits, self.soft_cap)


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeAnatomy(Anatomy):
    """A model that is run by its own forward, in which ``backbone`` ends with the last hidden state."""

    inputs: Callable[[torch.Tensor, torch.Tensor], Mapping[str, Any]]
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
    """Raises LookupError where the blocks cannot be distinguished from the rest."""
    config = getattr(model, "config", None)
    head: nn.Module | None = _ask(model, "get_output_embeddings")
    if getattr(config, "model_type", None) in IN_TWO_HALVES:
        decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        return Anatomy(model=model, backbone=decoder, blocks=_find_stack(model, decoder), head=head)
    text_part = find_text_part(model)
    blocks = _find_stacks(model) if text_part is None else _find_stacks_of_text(text_part)
    return WholeAnatomy(
        model=model,
        backbone=_child_with(model, blocks[-1]),
        blocks=blocks,
        head=head,
        inputs=_inputs_of(model),
        output=_logits_of,
    )


def find_text_part(model: nn.Module) -> nn.Module | None:
    """The decoder of text in a model that also takes images or sound; None where the model is one of text alone."""
    config = getattr(model, "config", None)
    if all(getattr(config, name, None) is None for name in _PARTS):
        return None
    decoder: nn.Module | None = _ask(model, "get_decoder")
    return None if decoder is model else decoder


def count_tokens(model: nn.Module) -> int:
    """Size of the vocabulary that a model's text is made of."""
    config: Any = model.config
    size: int = (getattr(config, "text_config", None) or config).vocab_size
    return size


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


def _find_stack(model: nn.Module, backbone: nn.Module) -> tuple[nn.Module, ...]:
    """The one list of modules directly under the backbone that is as long as the model is deep."""
    num_blocks = model.config.num_hidden_layers  # type: ignore[union-attr]
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList) and len(child) == num_blocks]
    if len(lists) != 1:
        raise LookupError(
            f"{type(model).__name__} has {len(lists)} lists of {num_blocks} blocks under its backbone, not one"
        )
    return tuple(lists[0])


def _find_stacks(model: nn.Module) -> tuple[nn.Module, ...]:
    """The blocks of every stack: of the outermost lists of modules those that hold a good part of the model's numbers.

    A list of single layers (the projections between Gemma 3n's streams) is no stack.
    """
    lists: list[nn.ModuleList] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and _has_parts(module) and id(module) not in inside:
            lists.append(module)
            inside.update(id(inner) for inner in module.modules())
    sizes = [sum(parameter.numel() for parameter in stack.parameters()) for stack in lists]
    found = [stack for stack, size in zip(lists, sizes, strict=True) if size > max(sizes) * _SMALLEST_STACK]
    if not found:
        raise LookupError(f"{type(model).__name__} has no list of blocks; its parts have to be given (Anatomy)")
    return tuple(block for stack in found for block in stack if not sees_images_alone(block))


def sees_images_alone(block: nn.Module) -> bool:
    """A block that attends to an image and to nothing else (Mllama's), and is passed over where there is none."""
    return hasattr(block, "cross_attn") and not hasattr(block, "self_attn")


def _has_parts(stack: nn.ModuleList) -> bool:
    return any(True for block in stack for _ in block.children())


def _find_stacks_of_text(text_part: nn.Module) -> tuple[nn.Module, ...]:
    """Those directly under the text part where there are some: beside them it may hold the parts for images and sound."""
    direct = nn.Module()
    for name, child in text_part.named_children():
        if isinstance(child, nn.ModuleList):
            direct.add_module(name, child)
    return _find_stacks(direct if any(True for _ in direct.children()) else text_part)


def _child_with(model: nn.Module, block: nn.Module) -> nn.Module:
    """The module directly under the model that holds a block, or the one within it where it is but a wrapper, whose own
    forward a model may pass by (``BartDecoderWrapper``).
    """
    for child in model.children():
        if any(module is block for module in child.modules()):
            only = [part for part in child.children() if not isinstance(part, nn.Embedding)]
            is_wrapper = len(only) == 1 and not isinstance(only[0], nn.ModuleList)
            return _child_with(child, block) if is_wrapper else child
    raise LookupError(f"{type(model).__name__} does not hold its last block")


def _inputs_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]:
    config = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    more = {"use_cache": False} if "use_cache" in accepted else {}
    if not getattr(config, "is_encoder_decoder", False):
        return lambda ids, labels: {"input_ids": ids, **more}
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise LookupError(f"{type(model).__name__} does not say what its decoder starts from")
    return lambda ids, labels: {"input_ids": ids, "decoder_input_ids": shift(labels), **more}


def _logits_of(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise LookupError(f"a {type(output).__name__} has no logits")
    return logits


def _ask(model: nn.Module, name: str) -> Any:
    method = getattr(model, name, None)
    return None if method is None else method()
