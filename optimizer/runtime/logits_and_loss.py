"""Carries out the logits-and-loss row of a plan: from the last hidden state to the loss."""

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.models.build import compute_logits
from optimizer.plan.logits_and_loss import LogitsAndLossPlan


def compute_loss(
    model: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, *, plan: LogitsAndLossPlan
) -> torch.Tensor:
    """Mean cross-entropy over all tokens, a scalar in the graph.

    hidden: [batch, sequence, hidden_size]; labels: [batch, sequence].
    """
    logits = compute_logits(model, hidden)
    # No shift and no upcast here: both would copy the largest tensor of the step.
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
