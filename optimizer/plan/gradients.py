"""Decisions about gradients: where each goes as soon as backward has made it."""

from dataclasses import dataclass
from typing import Literal

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
