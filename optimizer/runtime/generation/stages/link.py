"""A stage's connections: hidden states to the next one, each new token from the last to all others, the first one's wish to stop.

hidden states   on the device, over NCCL on CUDA and gloo on the CPU device. Both sides meet: who gives them waits until they are
                taken, and holds them until then; so no more memory is needed than on one device.
tokens          as numbers on the host. The last stage does not wait until they are taken: else it could wait for the first, which
                waits for the second to take hidden states, and so on to the last.
stopping        is the first stage's decision, before each step; it goes from stage to stage like hidden states, and before them.

What is allocated: the tensor into which hidden states come (activations), in the place of the one that the block before would
have made. Numbers lie in numpy's memory, which no meter sees.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from optimizer.plan.devices.stages import StageOfModel
from optimizer.runtime.ranks.group import Ranks, Sent

_TOKENS: Final = 1
_STOP: Final = 2


class StageLink:
    """The connections of one stage. Every stage must run the same micro-batches in the same order."""

    def __init__(self, ranks: Ranks, stage: StageOfModel) -> None:
        self._ranks = ranks
        ranks.open_ways(1)
        self.stage = stage
        self._sent_tokens: dict[int, list[Sent]] = {}
        self._sent_stop: list[Sent] = []
        self.num_hidden_bytes = 0
        """Bytes of hidden states that this stage has given on."""

    def receive_hidden(self, like: torch.Tensor) -> torch.Tensor:
        """Those of the stage before, in a new tensor of this shape. Raises RankLost."""
        hidden = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._ranks.receive_on_device(hidden, source=self.stage.index - 1)
        return hidden

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """To the next stage, which waits for them or will. Raises RankLost."""
        self._ranks.send_from_device(hidden.contiguous(), to=self.stage.index + 1)
        self.num_hidden_bytes += hidden.numel() * hidden.element_size()

    def send_tokens(self, turn: int, tokens: torch.Tensor) -> None:
        """A micro-batch's new tokens [batch], from the last stage to all others."""
        # They were taken before the hidden states came that these are made of.
        _finish(self._sent_tokens.pop(turn, []))
        numbers = tokens.tolist()
        others = range(self.stage.num_stages - 1)
        self._sent_tokens[turn] = [self._ranks.begin_sending(numbers, to=other, tag=_TOKENS) for other in others]

    def receive_tokens(self, into: torch.Tensor) -> None:
        """The oldest that were not taken yet, written to ``into`` [batch]. Raises RankLost."""
        numbers = self._ranks.receive_integers(len(into), source=self.stage.num_stages - 1, tag=_TOKENS)
        into.copy_(torch.from_numpy(numbers))

    def stops(self, should_stop: Callable[[], bool]) -> bool:
        """Return what the first stage was answered; all ask, since asking may do more. Raises RankLost."""
        wish = should_stop()
        if not self.stage.is_first:
            wish = bool(self._ranks.receive_integers(1, source=self.stage.index - 1, tag=_STOP)[0])
        if not self.stage.is_last:
            _finish(self._sent_stop)
            self._sent_stop = [self._ranks.begin_sending([int(wish)], to=self.stage.index + 1, tag=_STOP)]
        return wish

    def finish(self) -> None:
        """Wait until all that was sent is taken, at the end of a pass. Raises RankLost."""
        for sent in self._sent_tokens.values():
            _finish(sent)
        self._sent_tokens.clear()
        _finish(self._sent_stop)
        self._sent_stop = []


def _finish(sent: Sequence[Sent]) -> None:
    for each in sent:
        each.wait()
