"""Losses of preference training, from logits to a scalar, and the score of the reference that DPO compares with.

Rows are ``[2 * pairs, sequence]``: the better answers, then the worse ones in the same order. A row's score is the sum of its
labels' log-probabilities. DPO: Rafailov et al. 2023 (arXiv 2305.18290), equation 7. ORPO: Hong et al. 2024 (arXiv 2403.07691),
equations 4 to 7, with means over each answer's own tokens, as there, so that no loss depends on how a batch is split; TRL takes
the first mean over all tokens of a micro-batch, prompts among them.

The reference is the model itself with its adapters switched off, in a forward of its own without gradients and dropout: no copy
of any weight. Scores are summed in fp32; with bf16 weights each log-probability was rounded before.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.data.batches import IGNORED_LABEL
from optimizer.models.adapters import list_sites
from optimizer.workload import TrainingWorkload

_HIGHEST_MEAN = -1e-7
"""Mean log-probabilities are taken to be no higher: the odds of a certain answer are infinite."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The rewards of a step's pairs: by how much an answer was made likelier, times beta; ORPO's has no reference."""

    accuracy: float
    """Share of pairs whose better answer has the higher reward."""
    margin: float
    """Mean of the better answers' rewards less the worse ones'."""


def score_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Scores of the rows, [rows], fp32. logits: [rows, sequence, vocabulary]; labels: [rows, sequence]."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED_LABEL)
    return -losses.view(labels.shape).sum(1, dtype=torch.float32)


class Preference:
    """The loss of one workload's pairs, and the margins of those it has seen since ``begin``."""

    def __init__(self, workload: TrainingWorkload, *, keeps_rewards: bool) -> None:
        """keeps_rewards: False where there are no numbers to read."""
        self._objective = workload.objective
        self._beta = workload.beta
        self._keeps_rewards = keeps_rewards
        self.margins: list[float] = []
        """By how much each pair's better answer has the higher reward."""

    @property
    def has_reference(self) -> bool:
        return self._objective == "dpo"

    def begin(self) -> None:
        self.margins.clear()

    def loss(self, scores: torch.Tensor, labels: torch.Tensor, *, reference: torch.Tensor | None) -> torch.Tensor:
        """Mean over the pairs, a scalar. scores, reference: of all rows, the latter for DPO alone."""
        if self._objective == "dpo":
            assert reference is not None
            better, worse = (scores - reference).chunk(2)
            margins = self._beta * (better - worse)
            self._note(margins)
            return -F.logsigmoid(margins).mean()
        means = scores / (labels != IGNORED_LABEL).sum(1)
        better, worse = means.clamp(max=_HIGHEST_MEAN).chunk(2)
        self._note(self._beta * (better - worse))
        log_odds = (better - worse) - (_log_of_rest(better) - _log_of_rest(worse))
        return -(better + self._beta * F.logsigmoid(log_odds)).mean()

    def _note(self, margins: torch.Tensor) -> None:
        if self._keeps_rewards:
            self.margins += margins.detach().tolist()


def summarize_margins(margins: Sequence[float]) -> Rewards | None:
    """The rewards of pairs with these margins; None where nothing was seen or kept."""
    if not margins:
        return None
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    return Rewards(accuracy=accuracy, margin=statistics.fmean(margins))


def _log_of_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """Logarithm of what is left to 1."""
    return torch.log(-torch.expm1(log_probability))


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Inside, the model is what it was before its adapters: they are switched off, and so is dropout."""
    layers: Sequence[nn.Module] = [site.layer for site in list_sites(model)]
    was_training = model.training
    model.eval()
    _switch(layers, are_off=True)
    try:
        yield
    finally:
        _switch(layers, are_off=False)
        model.train(was_training)


def _switch(layers: Sequence[nn.Module], *, are_off: bool) -> None:
    # peft's own enable_adapters also says which parameters want gradients
    for layer in layers:
        layer._disable_adapters = are_off  # type: ignore[assignment]
