"""Carries out the precision of a plan's weights row: autocast, and the dynamic loss scale that fp16 needs.

Autocast casts each weight where it is used and keeps no cache of casts: a block that is kept holds its casts for backward
anyway, one that is recomputed lets them go, while torch's cache would hold every weight's cast until the loss is there.

Loss scale: small gradients vanish in fp16, so backward starts from ``scale`` instead of 1 and the update divides by it. A step
whose gradients overflow is left out and the scale halved; after 2,000 good steps in a row it is doubled. Powers of two, so
that scaling by itself changes no bit (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2; the
numbers are those of ``torch.amp.GradScaler``). It lives on the host: whether to step is decided there.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from optimizer.base.errors import CheckpointInvalid, LossNotFinite
from optimizer.plan.weights import WeightsPlan

INITIAL_SCALE: Final = 2.0**16
HIGHEST_HALF_SCALE: Final = 2.0**15
"""A loss made in fp16 cannot have a larger gradient: 2**16 is infinite there."""
LOWEST_SCALE: Final = 1.0
"""Gradients that overflow unscaled are not a matter of scale."""
GROWTH_STEPS: Final = 2000
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The precision of one run; holds the loss scale. Without fp16 the scale is 1 and nothing is ever left out."""

    def __init__(self, plan: WeightsPlan, *, device: torch.device) -> None:
        self.scales_loss = plan.scales_loss
        self._autocast = plan.autocast
        self._device_type = device.type
        self._highest = HIGHEST_HALF_SCALE if plan.dtype == "fp16" else float("inf")
        self.scale = min(INITIAL_SCALE, self._highest) if plan.scales_loss else 1.0
        """Factor by which gradients are larger than they ought to be."""
        self.num_overflows = 0
        """Steps left out since the start."""
        self._good_steps = 0

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward and loss; what is recomputed in backward enters it again by itself."""
        if self._autocast == "off":
            return nullcontext()
        return torch.autocast(self._device_type, dtype=_DTYPES[self._autocast], cache_enabled=False)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward from the scale instead of 1, so that the loss itself need not hold the product."""
        start = torch.full_like(loss, self.scale) if self.scales_loss else None
        loss.backward(gradient=start)  # type: ignore[no-untyped-call]

    def update(self, *, overflowed: bool) -> None:
        """After each step, before the weights are touched; one that overflowed must be left out.

        Raises LossNotFinite when not even the lowest scale helps.
        """
        if not self.scales_loss:
            return
        if not overflowed:
            self._grow()
            return
        if self.scale <= LOWEST_SCALE:
            raise LossNotFinite(
                f"gradients overflow fp16 even at a loss scale of {self.scale:g}, after {self.num_overflows} steps left out",
                hint="Lower the learning rate, or train in bf16 or fp32, whose range is larger.",
                loss_scale=self.scale,
            )
        self.scale /= 2
        self.num_overflows += 1
        self._good_steps = 0

    def _grow(self) -> None:
        self._good_steps += 1
        if self._good_steps >= GROWTH_STEPS:
            self.scale = min(self.scale * 2, self._highest)
            self._good_steps = 0

    def export_state(self) -> dict[str, float | int]:
        """The state for a checkpoint; JSON-able."""
        return {"scale": self.scale, "good_steps": self._good_steps, "num_overflows": self.num_overflows}

    def import_state(self, state: dict[str, float | int]) -> None:
        """Undo ``export_state``. Raises CheckpointInvalid where the state is of a run that does not scale as this one."""
        scale = float(state["scale"])
        if (scale != 1.0 and not self.scales_loss) or not 0 < scale <= max(self._highest, 1.0):
            raise CheckpointInvalid(f"the checkpoint's loss scale is {scale:g}, which the plan's precision does not use")
        self.scale = scale
        self._good_steps = int(state["good_steps"])
        self.num_overflows = int(state["num_overflows"])
