"""The extent of a profile: all there is to trace, or what one question needs.

A whole profile takes seconds to trace. One estimate needs one representation of the weights, the choices of one plan, and the
ranges in which its shapes lie.
"""

from dataclasses import dataclass
from typing import TypeVar

from optimizer.plan.activations import OFFLOADING, BlockChoice
from optimizer.profile.sizes import Shape


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The extent of a question; None, of each, is everything."""

    representations: tuple[str, ...] | None = None
    """Representations of the weights (``WeightsPlan.representation``); fp16 has the sizes of bf16, and is written so."""
    choices: tuple[BlockChoice, ...] | None = None
    """Choices of blocks, as they are traced: ``offload`` stands for every place. ``keep`` is always among them."""
    shapes: tuple[Shape, ...] | None = None
    """Micro-batch sizes and sequence lengths; traced are the whole ranges in which they lie."""

    @property
    def is_everything(self) -> bool:
        return self == EVERYTHING

    def union(self, other: "Extent") -> "Extent":
        """Everything that both ask for, and at most that for every combination."""
        return Extent(
            representations=_union(self.representations, other.representations),
            choices=_union(self.choices, other.choices),
            shapes=_union(self.shapes, other.shapes),
        )


EVERYTHING = Extent()
T = TypeVar("T")


def traced_choice(choice: BlockChoice) -> BlockChoice:
    """The choice under which a block is traced; only where the bytes go differs."""
    return "offload" if choice in OFFLOADING else choice


def traced_representation(name: str) -> str:
    """fp16 has the sizes of bf16, in autocast as well."""
    return name.replace("fp16", "bf16")


def _union(one: tuple[T, ...] | None, other: tuple[T, ...] | None) -> tuple[T, ...] | None:
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))
