"""A stage's connections in training: hidden states to the next stage, their gradients to the one before.

What is sent is held until it is taken, and who sends goes on meanwhile; it is let go of at one of two moments, which are the same
in every run, so that the bytes are:

hidden states   when the next ones are to be sent, or when a gradient has come from the stage that they went to
gradients       when the next ones are to be sent, or when hidden states have come from the stage that they went to

Each of these moments is one at which the other side has taken them or is about to, so no two stages wait for each other.

What is allocated: the tensor into which hidden states come (activations, in the place of the one that the block before would have
made), and the one into which gradients come (temporaries, likewise).
"""

import torch

from optimizer.plan.stages import StageOfModel
from optimizer.runtime.ranks.group import Arriving, Ranks


class PipelineLink:
    """The connections of one stage. Every stage must run the same micro-batches in the same order."""

    def __init__(self, ranks: Ranks, stage: StageOfModel) -> None:
        self._ranks, self._stage = ranks, stage
        self._to_next: tuple[Arriving, torch.Tensor] | None = None
        self._to_previous: tuple[Arriving, torch.Tensor] | None = None
        ranks.open_way_back()

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the next stage. Raises RankLost."""
        self._settle_next()
        given = hidden.detach().contiguous()
        self._to_next = self._ranks.begin_sending_from_device(given, to=self._stage.index + 1), given

    def receive_hidden(self, into: torch.Tensor) -> None:
        """Those of the stage before. Raises RankLost."""
        self._ranks.receive_on_device(into, source=self._stage.index - 1)
        self._settle_previous()

    def send_gradient(self, gradient: torch.Tensor) -> None:
        """To the stage before. Raises RankLost."""
        self._settle_previous()
        given = gradient.detach().contiguous()
        self._to_previous = self._ranks.begin_sending_from_device(given, to=self._stage.index - 1, is_back=True), given

    def receive_gradient(self, into: torch.Tensor) -> None:
        """Fill it with the gradient of hidden states that the next stage was sent. Raises RankLost."""
        self._ranks.receive_on_device(into, source=self._stage.index + 1, is_back=True)
        self._settle_next()

    def finish(self) -> None:
        """Wait until all that was sent is taken, at the end of a step or an evaluation. Raises RankLost."""
        self._settle_next()
        self._settle_previous()

    def _settle_next(self) -> None:
        sent, self._to_next = self._to_next, None
        if sent is not None:
            sent[0].wait()

    def _settle_previous(self) -> None:
        sent, self._to_previous = self._to_previous, None
        if sent is not None:
            sent[0].wait()
