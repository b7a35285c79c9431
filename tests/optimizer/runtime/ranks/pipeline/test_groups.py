"""No schedule makes devices wait for each other for ever where all that goes by one group of ranks goes in the order asked for.

NCCL's groups do so (torch's ``ProcessGroupNCCL::pointToPoint`` after an eager connection): a group has one stream on each device,
and what is sent occupies it until it is taken. Run here without a device, from what the connections themselves ask for.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from optimizer.plan.devices.stages import RankStages, Turn, count_sent_at_once, deal_stages, list_turns
from optimizer.runtime.ranks.group import Arriving, Ranks
from optimizer.runtime.ranks.pipeline.link import PipelineLink

SOME = torch.ones(1)


@dataclass(eq=False, kw_only=True)
class Operation:
    """Something that a rank sends or takes."""

    is_send: bool
    peer: int
    way: int
    is_done: bool = False


@dataclass(kw_only=True)
class AskedFor:
    """Stands for the ranks as one of them sees them: notes what is asked for, and where compute waits for it."""

    asked: list[tuple[Operation, bool]] = field(default_factory=list)
    """In order; True where compute waits."""
    num_ways: int = 1

    def open_ways(self, number: int) -> None:
        self.num_ways = number

    def settle(self, *, timeout_s: float) -> None:
        """Compute has waited for all before."""

    def begin_sending_from_device(self, tensor: torch.Tensor, *, to: int, way: int) -> Arriving:
        operation = self._ask(Operation(is_send=True, peer=to, way=way))
        return Arriving(lambda: self.asked.append((operation, True)))

    def receive_on_device(self, tensor: torch.Tensor, *, source: int, way: int) -> None:
        operation = self._ask(Operation(is_send=False, peer=source, way=way))
        self.asked.append((operation, True))

    def _ask(self, operation: Operation) -> Operation:
        assert operation.way < self.num_ways
        self.asked.append((operation, False))
        return operation


def ask_for(own: RankStages, turns: Iterable[Turn], *, num_micro_batches: int) -> list[tuple[Operation, bool]]:
    """The calls of one rank in these turns, as ``PipelineStages`` has its connections do."""
    noted = AskedFor()
    link = PipelineLink(cast(Ranks, noted), own)
    link.begin(count_sent_at_once(own, num_micro_batches=num_micro_batches))
    last = len(own.stages) * own.num_ranks - 1
    for kind, _, stage in turns:
        if kind == "forward":
            if stage > 0:
                link.receive_hidden(SOME)
            if stage < last:
                link.send_hidden(SOME)
        else:
            if stage < last:
                link.receive_gradient(SOME)
            if stage > 0:
                link.send_gradient(SOME)
    link.finish()
    return noted.asked


def all_end(by_rank: Sequence[list[tuple[Operation, bool]]]) -> bool:
    """Report whether all ranks come to their end."""
    left = [deque(asked) for asked in by_rank]
    streams: dict[tuple[int, int], deque[Operation]] = {}
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, asked in enumerate(left):
            while asked and (asked[0][0].is_done or not asked[0][1]):
                operation, waits = asked.popleft()
                if not waits:
                    streams.setdefault((rank, operation.way), deque()).append(operation)
                goes_on = True
        for (rank, way), stream in streams.items():
            other = streams.get((stream[0].peer, way)) if stream else None
            if other and stream[0].is_send and not other[0].is_send and other[0].peer == rank:
                stream.popleft().is_done = other.popleft().is_done = True
                goes_on = True
    return not any(left)


SCHEDULES = [("1f1b", 1), ("gpipe", 1), *(("breadth_first", rounds) for rounds in (1, 2, 3, 5))]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("schedule", "num_rounds"), SCHEDULES)
def test_devices_never_wait_for_each_other_by_the_order_of_a_groups_stream(
    schedule: Any, num_rounds: int, num_ranks: int
) -> None:
    ranks = deal_stages((1,) * num_ranks * num_rounds, num_ranks)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 17):
        step = [
            ask_for(own, list_turns(own, num_micro_batches=count, schedule=schedule), num_micro_batches=count) for own in ranks
        ]
        assert all_end(step), f"a step of {count} micro-batches"
        evaluation = [
            ask_for(
                own,
                [Turn("forward", index, stage.index) for stage in own.stages for index in range(count)],
                num_micro_batches=count,
            )
            for own in ranks
        ]
        assert all_end(evaluation), f"an evaluation of {count} micro-batches"
