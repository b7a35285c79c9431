"""Bytes and times of the sums that ranks which share each block make of hidden states and of their gradients. Torch-free.

Forward sums in the numbers in which products are made, backward in those of hidden states. Compute waits for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from optimizer.estimate.categories.network import Network
from optimizer.estimate.collectives.gloo import Call
from optimizer.plan.activations import BlockChoice
from optimizer.plan.plan import Plan
from optimizer.profile.profile import BlockSums, Profile

Phase = Literal["forward", "backward"]
_AUTOCAST_BYTES: Final = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class SumCosts:
    """The sums of one micro-batch under one plan."""

    sums: BlockSums
    num_blocks: int
    result_ms: float
    """Milliseconds of the sum of a block's results."""
    gradient_ms: float
    """The same of a gradient of the hidden state."""
    result_sent_bytes: tuple[float, ...]
    """Bytes that each rank sends for the sum of a block's results."""
    gradient_sent_bytes: tuple[float, ...]

    def list_ms(self, phase: Phase, choices: Sequence[BlockChoice]) -> tuple[float, ...]:
        """Milliseconds for which each block waits, in order."""
        if phase == "forward":
            return (self.sums.forward * self.result_ms,) * len(choices)
        again_ms = {choice: number * self.result_ms for choice, number in self.sums.again.items()}
        numbers = [self.sums.first_backward, *[self.sums.backward] * (len(choices) - 1)]
        return tuple(
            number * self.gradient_ms + again_ms.get(choice, 0.0) for number, choice in zip(numbers, choices, strict=True)
        )

    @property
    def least_ms(self) -> float:
        """Milliseconds of a micro-batch whose blocks make nothing again."""
        keep: list[BlockChoice] = ["keep"] * self.num_blocks
        return sum(self.list_ms("forward", keep)) + sum(self.list_ms("backward", keep))

    def sent_bytes(self, choices: Sequence[BlockChoice]) -> tuple[float, ...]:
        """Bytes that each rank gives to its connections for them."""
        num_blocks, sums = len(choices), self.sums
        num_results = sums.forward * num_blocks + sum(sums.again.get(choice, 0) for choice in choices)
        num_gradients = sums.first_backward + sums.backward * (num_blocks - 1)
        by_rank = zip(self.result_sent_bytes, self.gradient_sent_bytes, strict=True)
        return tuple(num_results * result + num_gradients * gradient for result, gradient in by_rank)


def estimate_sums(profile: Profile, plan: Plan, network: Network | None, *, sequence_length: int) -> SumCosts | None:
    """The sums' costs; None where each block is on one device. plan: of which the blocks' choices are not looked at."""
    if network is None or profile.sums is None:
        return None
    num_elements = plan.batch.micro_batch_size * sequence_length * profile.hidden_size
    size = plan.weights.bytes_per_element
    made = size if plan.weights.autocast == "off" else _AUTOCAST_BYTES
    result, gradient = ((num_elements * each, each) for each in (made, size))
    times_ms = [network.sum_ms("all_reduce", [num_bytes], element_bytes=each) for num_bytes, each in (result, gradient)]
    sent = [
        network.sent_by_rank(Call(collective="all_reduce", num_bytes=num_bytes, element_bytes=each))
        for num_bytes, each in (result, gradient)
    ]
    return SumCosts(
        sums=profile.sums,
        num_blocks=profile.num_blocks,
        result_ms=times_ms[0],
        gradient_ms=times_ms[1],
        result_sent_bytes=sent[0],
        gradient_sent_bytes=sent[1],
    )
