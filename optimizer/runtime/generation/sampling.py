"""Takes the next token of each sequence from its logits: the likeliest, or one that is drawn.

Each sequence has a random generator of its own on the host, which gives one number for each token drawn: what is drawn depends
on the seed and the logits alone, not on what else is in the batch. Sequences that draw are seen to one after the other, so
that the room this takes is that of one. On the device, beside the logits: the scores of one sequence in fp32 twice and their
places as int64 (``draw_bytes``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from optimizer.formats.sampling import Sampling


@dataclass(eq=False)
class Chooser:
    """Draws the tokens of one sequence."""

    sampling: Sampling
    _random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.sampling.seed)

    def draw(self, logits: torch.Tensor, *, into: torch.Tensor) -> None:
        """One token by ``logits`` [vocabulary], written to ``into``, a number on the same device."""
        sampling = self.sampling
        number = torch.rand((), generator=self._random, dtype=torch.float64).item()
        scores = logits.to(torch.float32, copy=True).div_(sampling.temperature)
        scores, tokens = scores.sort(descending=True, stable=True)
        sums = scores.softmax(dim=0).cumsum_(dim=0)
        del scores
        # Those that come before the limit is reached, and the one that reaches it.
        num_kept = torch.searchsorted(sums, sampling.top_p).add_(1)
        num_kept.clamp_(max=min(sampling.top_k or len(tokens), len(tokens)))
        limit = sums[num_kept - 1] * number
        index = torch.searchsorted(sums, limit, right=True).clamp_(max=num_kept - 1)
        into.copy_(tokens[index])


def choose_tokens(logits: torch.Tensor, *, into: torch.Tensor, choosers: Sequence[Chooser | None]) -> None:
    """The next token of each sequence of ``logits`` [batch, vocabulary] into ``into`` [batch].

    choosers: by sequence; None takes the likeliest. May be shorter than the batch: the likeliest for the rest.
    """
    into.copy_(logits.argmax(dim=-1))
    for index, chooser in enumerate(choosers):
        if chooser is not None:
            chooser.draw(logits[index], into=into[index])
