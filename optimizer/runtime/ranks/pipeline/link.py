"""A device's connections in training: hidden states to the next stage, their gradients to the one before.

What is sent is held until it is taken, and who sends goes on meanwhile; it is let go of at one of two moments, which are the same
in every run, so that the bytes are:

hidden states   when so many are held that the next would be too many (``count_sent_at_once``), or when a gradient has come from
                the stage that they went to
gradients       when so many are held, or, where that is one, when hidden states have come from the stage that they went to

Each of these moments is one at which the other side has taken them or is about to, so no two devices wait for each other.

What is allocated: the tensor into which hidden states come (activations, in the place of the one that the block before would have
made), and the one into which gradients come (temporaries, likewise).
"""

from collections import deque
from typing import NamedTuple

import torch

from optimizer.plan.devices.stages import RankStages, SentAtOnce
from optimizer.runtime.ranks.group import PATIENCE_S, Arriving, Ranks


class _Ways(NamedTuple):
    """Ways of a group of ranks (``Ranks.open_ways``) for what goes between two neighbours."""

    hidden: int = 0
    gradients: int = 1


class PipelineLink:
    """The connections of one device. Every device must run the same micro-batches in the order of the schedule."""

    def __init__(self, ranks: Ranks, own: RankStages) -> None:
        self._ranks = ranks
        self._rank, self._num_ranks = own.rank, own.num_ranks
        self._at_once = SentAtOnce()
        self._hidden: deque[tuple[Arriving, torch.Tensor]] = deque()
        self._gradients: deque[tuple[Arriving, torch.Tensor]] = deque()
        # In one order with what goes on, every device would wait for the next one, and the last for the first.
        self._ways_round = _Ways(hidden=2, gradients=3) if len(own.stages) > 1 else _Ways()
        ranks.open_ways(1 + max(self._ways_round))

    def begin(self, at_once: SentAtOnce) -> None:
        """Before the first micro-batch of a step or an evaluation."""
        self._at_once = at_once

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the next stage. Raises RankLost."""
        _settle(self._hidden, leaving=self._at_once.hidden - 1)
        self._hidden.append(self._send(hidden, to=self._next, way=self._ways(is_round=self._is_last).hidden))

    def receive_hidden(self, into: torch.Tensor) -> None:
        """Those of the stage before. Raises RankLost."""
        self._ranks.receive_on_device(into, source=self._previous, way=self._ways(is_round=self._is_first).hidden)
        if self._at_once.gradients == 1:
            _settle(self._gradients)

    def send_gradient(self, gradient: torch.Tensor) -> None:
        """To the stage before. Raises RankLost."""
        _settle(self._gradients, leaving=self._at_once.gradients - 1)
        self._gradients.append(self._send(gradient, to=self._previous, way=self._ways(is_round=self._is_first).gradients))

    def receive_gradient(self, into: torch.Tensor) -> None:
        """Fill it with the gradient of hidden states that the next stage was sent. Raises RankLost."""
        self._ranks.receive_on_device(into, source=self._next, way=self._ways(is_round=self._is_last).gradients)
        _settle(self._hidden)

    def finish(self) -> None:
        """Wait until all that was sent is taken, at the end of a step or an evaluation. Raises RankLost."""
        _settle(self._hidden)
        _settle(self._gradients)
        # On CUDA nothing has kept the process until now, and it has less patience with what follows.
        self._ranks.settle(timeout_s=PATIENCE_S)

    @property
    def _next(self) -> int:
        return (self._rank + 1) % self._num_ranks

    @property
    def _previous(self) -> int:
        return (self._rank - 1) % self._num_ranks

    @property
    def _is_first(self) -> bool:
        return self._rank == 0

    @property
    def _is_last(self) -> bool:
        return self._rank == self._num_ranks - 1

    def _ways(self, *, is_round: bool) -> _Ways:
        """is_round: between the last device and the first, between which micro-batches come round."""
        return self._ways_round if is_round else _Ways()

    def _send(self, tensor: torch.Tensor, *, to: int, way: int) -> tuple[Arriving, torch.Tensor]:
        given = tensor.detach().contiguous()
        return self._ranks.begin_sending_from_device(given, to=to, way=way), given


def _settle(held: deque[tuple[Arriving, torch.Tensor]], *, leaving: int = 0) -> None:
    """Let go of what was sent first, once it is taken, until ``leaving`` are held."""
    while len(held) > leaving:
        sent, _ = held[0]
        sent.wait()
        held.popleft()
