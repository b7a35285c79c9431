"""Decisions about weights: the representation they are trained in, and where blocks keep theirs between uses."""

from dataclasses import dataclass
from typing import Literal

from optimizer.base.errors import InvalidPlan

WeightsDtype = Literal["fp32", "bf16", "fp16"]
Autocast = Literal["off", "bf16", "fp16"]
WeightsPlace = Literal["device", "host", "disk"]
FrozenFormat = Literal["same", "int8", "int4", "nf4"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """Representation and place of the weights."""

    dtype: WeightsDtype = "fp32"
    """Dtype of weights, gradients and activations. Below fp32 the optimizer keeps fp32 master weights in its state."""
    autocast: Autocast = "off"
    """Products and attention run in this dtype on fp32 weights, which are cast as they are used. Needs ``dtype`` fp32."""
    place: WeightsPlace = "device"
    """Tier of each block's weights between uses; they are brought to the device for the block's forward and backward.
    Weights of no block (embedding, final norm, head) stay on the device."""
    prefetch: int = 1
    """Blocks fetched ahead of the one that computes, where weights are not on the device."""
    frozen: FrozenFormat = "same"
    """Format of the matrices that are not trained (under adapters); they are unpacked to ``dtype`` for each product. nf4 needs
    bitsandbytes; int4 needs only torch and takes as many bytes."""

    def __post_init__(self) -> None:
        if self.autocast != "off" and self.dtype != "fp32":
            raise InvalidPlan(
                f"plan.weights.autocast is {self.autocast} with {self.dtype} weights; allowed: fp32 weights, or off",
                field="plan.weights.autocast",
                value=self.autocast,
                allowed="off, unless plan.weights.dtype is fp32",
            )
        if not 0 <= self.prefetch <= 8:
            raise InvalidPlan(
                f"plan.weights.prefetch is {self.prefetch}; allowed: 0 to 8",
                field="plan.weights.prefetch",
                value=self.prefetch,
                allowed={"minimum": 0, "maximum": 8},
            )

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of trained weights and their gradients."""
        return DTYPE_BYTES[self.dtype]

    @property
    def computes_in_fp16(self) -> bool:
        return "fp16" in (self.dtype, self.autocast)

    @property
    def scales_loss(self) -> bool:
        """True if gradients may underflow, so that the loss is scaled and steps that overflow are skipped."""
        return self.computes_in_fp16

    @property
    def representation(self) -> str:
        """The name of a profile's regime: ``fp32``, ``bf16``, ``fp32+bf16`` for autocast, ``bf16/nf4`` for frozen."""
        computed = self.dtype if self.autocast == "off" else f"{self.dtype}+{self.autocast}"
        return computed if self.frozen == "same" else f"{computed}/{self.frozen}"
