"""Adafactor with state that is made apart from its update, so that what the update holds for a moment counts as temporary.

The update is torch's, tensor by tensor: a mean of squares for each row and each column of a matrix, whose product stands for the
second moment; no first moment; steps as large as the tensor's own root mean square says, and never larger than the learning
rate. Source: Shazeer and Stern, Adafactor (arXiv 1804.04235).

An update of a matrix of n elements holds n fp32 numbers and one for each row and column; of a vector twice n.
"""

from typing import Any

import torch


class Adafactor(torch.optim.Adafactor):
    """torch's, to be stepped one tensor at a time."""

    def make_state(self) -> None:
        """Make the state of tensors that have a first gradient, where the tensors are."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is not None and not state:
                    state.update(_begin(parameter.grad))


def _begin(gradient: torch.Tensor) -> dict[str, Any]:
    """Begin the state as torch's own does; the count of steps lies beside the rest."""
    count = {"step": torch.zeros((), dtype=torch.float32, device=gradient.device)}
    if gradient.dim() < 2:
        return {**count, "variance": torch.zeros_like(gradient)}
    shape = list(gradient.shape)
    return {
        **count,
        "row_var": gradient.new_zeros([*shape[:-1], 1]),
        "col_var": gradient.new_zeros([*shape[:-2], 1, shape[-1]]),
    }
