"""Ranks' calls to NCCL and how its errors end, by a stand-in for its groups: NCCL itself needs a card for each rank."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import OutOfDeviceMemory, RankLost
from optimizer.base.units import MIB
from optimizer.runtime.device.cuda import CudaMemory
from optimizer.runtime.ranks.group import PATIENCE_S, RankPlace, Ranks

TIMEOUT_S = 20.0


class NoGroup:
    """A group whose communicator was aborted as soon as it was there."""

    made: list["NoGroup"]

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, num_ranks: int, options: Options) -> None:
        self.timeout = options._timeout
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connected at once."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def abort(self) -> None:
        """It was before."""

    def refuse(self, *args: object) -> None:
        raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")

    allreduce = reduce = broadcast = send = recv = refuse


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(NoGroup, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NoGroup, raising=False)
    place = RankPlace(rank=0, num_ranks=1, folder=tmp_path, timeout_s=TIMEOUT_S)
    with Ranks(place, device=torch.device("cuda")) as ranks:
        yield ranks


ASKED: dict[str, Callable[[Ranks, torch.Tensor], object]] = {
    "a sum": lambda ranks, tensor: ranks.all_reduce_(tensor),
    "a sum that is waited for later": lambda ranks, tensor: ranks.all_reduce_(tensor, waits=False),
    "a sum of one rank's": lambda ranks, tensor: ranks.reduce_(tensor, owner=0),
    "another's": lambda ranks, tensor: ranks.broadcast_(tensor, owner=0),
    "another's that was asked for": lambda ranks, tensor: ranks.begin_broadcast(tensor, owner=0),
    "sent": lambda ranks, tensor: ranks.send_from_device(tensor, to=0),
    "received": lambda ranks, tensor: ranks.receive_on_device(tensor, source=0),
}
"""By name, a call."""


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_communicator_that_was_aborted_before_anything_is_asked_of_it_is_a_lost_rank(ranks: Ranks, ask: Any) -> None:
    with pytest.raises(RankLost, match=r"rank 0 of 1 waited .*NCCL communicator was aborted on rank 0"):
        ask(ranks, torch.ones(3))


NCCL_WORDS = [
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 6291456 bytes", 6 * MIB),
    ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'", 4 * MIB + 1),
]


@pytest.mark.parametrize(("words", "requested_bytes"), NCCL_WORDS)
def test_a_card_that_has_no_room_for_nccl_is_out_of_memory(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, words: str, requested_bytes: int
) -> None:
    def refuse(group: NoGroup, device: torch.device) -> None:
        raise torch.distributed.DistBackendError(words)

    monkeypatch.setattr(NoGroup, "eager_connect_single_device", refuse)
    monkeypatch.setattr(CudaMemory, "free_bytes", 4 * MIB)
    monkeypatch.setattr(CudaMemory, "total_bytes", 1024 * MIB)
    with pytest.raises(OutOfDeviceMemory, match="device memory ran out while NCCL connected the ranks") as caught:
        ranks.open_ways(2)
    assert caught.value.fields["requested_bytes"] == requested_bytes
    assert caught.value.fields["in_use_bytes"] == 1020 * MIB


def test_a_rank_that_cannot_connect_to_others_has_lost_them(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoGroup, "eager_connect_single_device", NoGroup.refuse)
    with pytest.raises(RankLost, match="for the others to connect"):
        ranks.open_ways(2)


def test_nccl_ends_a_sum_after_twice_the_time_and_has_as_much_patience_with_stages_as_gloo(ranks: Ranks) -> None:
    assert [each.timeout for each in NoGroup.made] == [timedelta(seconds=2 * TIMEOUT_S)]
    ranks.open_ways(2)
    assert [each.timeout for each in NoGroup.made] == [timedelta(seconds=PATIENCE_S)] * 2
