"""What can be decided about weights: the representation they are trained in."""

from dataclasses import dataclass
from typing import Literal

WeightsDtype = Literal["fp32", "bf16"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class WeightsPlan:
    """Weights live on the device, whole."""

    dtype: WeightsDtype = "fp32"
    """Dtype of weights, gradients and activations. With bf16 the optimizer keeps fp32 master weights in its state."""

    @property
    def bytes_per_element(self) -> int:
        return DTYPE_BYTES[self.dtype]
