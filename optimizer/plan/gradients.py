"""Decisions about gradients: where each goes as soon as backward has made it."""

from dataclasses import dataclass
from typing import Final, Literal

from optimizer.plan.knob import Face, Knob, TechniqueDeclaration, Use, equals

GradientsChoice = Literal["keep", "consume", "host"]


@dataclass(frozen=True, kw_only=True)
class GradientsPlan:
    """One choice for all trained tensors.

    keep     gradients stay on the device until the optimizer has stepped.
    consume  each tensor is updated as soon as its gradient is complete, and the gradient is dropped; gradients never exist
             together. Needs one micro-batch per step and no clipping, because both wait for all gradients.
    host     each gradient moves to the host as it appears, and is added up there.
    """

    choice: GradientsChoice = "keep"


@dataclass(frozen=True, kw_only=True)
class GradientsPins:
    """Decisions of ``GradientsPlan`` that are made beforehand; None leaves one free."""

    choice: GradientsChoice | None = None


TECHNIQUES: Final = (
    TechniqueDeclaration(
        name="consume_gradients",
        label="update as gradients appear",
        sentence="Updates each tensor inside backward, as soon as its gradient is complete, which then goes: no clipping, one "
        "micro-batch.",
        explanation="each tensor is updated as soon as its gradient is there, so gradients never stand together",
        group="Gradients, optimizer state and weights",
        lowers=("gradients",),
    ),
    TechniqueDeclaration(
        name="offload_gradients",
        label="gradients on the host",
        sentence="Moves each gradient to the host as it appears and adds micro-batches up there.",
        explanation="each gradient moves to the host as it appears",
        group="Gradients, optimizer state and weights",
        lowers=("gradients",),
    ),
)
KNOBS: Final = (
    Knob(
        path="gradients.choice",
        plain="keep",
        words={"keep": "kept until the update", "consume": "used up as they appear", "host": "on the host"},
        uses=(
            Use(technique="consume_gradients", asks=equals("consume")),
            Use(technique="offload_gradients", asks=equals("host")),
        ),
        training=Face(label="Gradients"),
    ),
)
