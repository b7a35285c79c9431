"""Waits for a rank that is late: both are threads of one process, so that a wait that is missing is missed by the first."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import RankLost
from optimizer.models.spec import read_model_spec
from optimizer.plan.devices.generation_layout import GenerationLayout
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.generation import GenerationPlan
from optimizer.runtime.generation.run_requests import open_generator
from optimizer.runtime.ranks.group import RankPlace, Ranks
from optimizer.runtime.ranks.replicas import find_replica
from optimizer.runtime.ranks.shared_homes import SharedHomes
from optimizer.runtime.ranks.shared_step import SharedStep
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import make_plan

CPU = torch.device("cpu")
LAG_S = 0.3
LOADING_S = 3.0
"""Longer than a small model takes to be made."""
LARGE = 4 * 1024 * 1024
"""Elements: more bytes than a connection holds that nobody reads from."""


class TwoRanks:
    """Rank 0, on this thread, and rank 1, which does what it is given a moment later."""

    def __init__(self, first: Ranks, second: Ranks, executor: ThreadPoolExecutor) -> None:
        self.first, self.second = first, second
        self._executor = executor
        self.has_begun = threading.Event()
        """Rank 1 is no longer late."""

    def late(self, do: Callable[..., Any], /, *args: Any, lag_s: float = LAG_S, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            time.sleep(lag_s)
            self.has_begun.set()
            return do(*args, **kwargs)

        self.has_begun.clear()
        return self._executor.submit(run)


@contextmanager
def two_ranks(folder: Path, *, timeout_s: float = 20.0) -> Iterator[TwoRanks]:
    with ThreadPoolExecutor(1) as executor:
        places = [RankPlace(rank=rank, num_ranks=2, folder=folder, timeout_s=timeout_s) for rank in range(2)]
        coming = executor.submit(Ranks, places[1], device=CPU)
        with Ranks(places[0], device=CPU) as first, coming.result() as second:
            yield TwoRanks(first, second, executor)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoRanks]:
    with two_ranks(tmp_path) as both:
        yield both


def _begin_and_wait(ranks: Ranks, tensor: torch.Tensor) -> None:
    ranks.begin_broadcast(tensor, owner=1).wait()


TAKING: dict[str, tuple[Callable[[Ranks, torch.Tensor], None], float]] = {
    "a sum": (lambda ranks, tensor: ranks.all_reduce_(tensor), 3.0),
    "a sum of one rank's": (lambda ranks, tensor: ranks.reduce_(tensor, owner=0), 3.0),
    "a sum on the host": (lambda ranks, tensor: ranks.all_reduce_on_host_(tensor), 3.0),
    "the largest": (lambda ranks, tensor: ranks.all_reduce_on_host_(tensor, largest=True), 2.0),
    "another's": (lambda ranks, tensor: ranks.broadcast_(tensor, owner=1), 2.0),
    "another's that was asked for": (_begin_and_wait, 2.0),
    "another's on the host": (lambda ranks, tensor: ranks.broadcast_on_host_(tensor, owner=1), 2.0),
}
"""By name, a call of both ranks, and the number that rank 0 then has where it gave ones and the other twos."""


@pytest.mark.parametrize(("call", "expected"), TAKING.values(), ids=TAKING)
def test_numbers_of_a_late_rank_are_there_when_they_are_used(
    two: TwoRanks, call: Callable[[Ranks, torch.Tensor], None], expected: float
) -> None:
    mine, other = torch.ones(1000), torch.full((1000,), 2.0)
    late = two.late(call, two.second, other)
    call(two.first, mine)
    assert torch.equal(mine, torch.full((1000,), expected))
    late.result()


def test_rows_of_a_late_rank_are_there_when_they_are_read(two: TwoRanks) -> None:
    late = two.late(two.second.exchange, [2.0, 5.0])
    assert two.first.exchange([1.0, 4.0]) == [[1.0, 4.0], [2.0, 5.0]]
    assert late.result() == [[1.0, 4.0], [2.0, 5.0]]


def test_all_ranks_have_come_to_a_barrier_when_it_ends(two: TwoRanks) -> None:
    late = two.late(two.second.barrier)
    two.first.barrier()
    assert two.has_begun.is_set()
    late.result()


def test_numbers_are_read_only_once_a_late_rank_has_sent_them(two: TwoRanks) -> None:
    late = two.late(lambda: two.second.begin_sending([4, 5], to=0, tag=7).wait())
    assert two.first.receive_integers(2, source=1, tag=7).tolist() == [4, 5]
    late.result()


def test_a_tensor_is_read_only_once_a_late_rank_has_sent_it(two: TwoRanks) -> None:
    into = torch.zeros(9)
    late = two.late(two.second.send, torch.full((9,), 3.0), to=0)
    two.first.receive(into, source=1)
    assert torch.equal(into, torch.full((9,), 3.0))
    late.result()


def test_hidden_states_are_read_only_once_a_late_rank_has_sent_them(two: TwoRanks) -> None:
    into = torch.zeros(9)
    late = two.late(two.second.send_from_device, torch.full((9,), 3.0), to=0)
    two.first.receive_on_device(into, source=1)
    assert torch.equal(into, torch.full((9,), 3.0))
    late.result()


SENDING: dict[str, tuple[Callable[[Ranks, torch.Tensor], None], Callable[[Ranks, torch.Tensor], Any]]] = {
    "on the host": (lambda ranks, tensor: ranks.send(tensor, to=1), lambda ranks, into: ranks.receive(into, source=0)),
    "on the device": (
        lambda ranks, tensor: ranks.send_from_device(tensor, to=1),
        lambda ranks, into: ranks.receive_on_device(into, source=0),
    ),
    "numbers": (
        lambda ranks, tensor: ranks.begin_sending(tensor.tolist(), to=1, tag=3).wait(),
        lambda ranks, into: into.copy_(torch.from_numpy(ranks.receive_integers(len(into), source=0, tag=3))),
    ),
}


@pytest.mark.parametrize(("send", "take"), SENDING.values(), ids=SENDING)
def test_what_is_sent_is_a_ranks_own_again_only_once_a_late_one_has_taken_it(two: TwoRanks, send: Any, take: Any) -> None:
    given = torch.ones(LARGE, dtype=torch.int64)
    into = torch.zeros_like(given)
    late = two.late(take, two.second, into)
    send(two.first, given)
    assert two.has_begun.is_set()
    given.zero_()
    late.result()
    assert int(into.sum()) == LARGE


def test_ranks_have_patience_for_each_other_until_homes_are_made_and_filled(tmp_path: Path) -> None:
    """Models are built and read in different times, longer than a wait in a step may be."""

    def make_homes(ranks: Ranks) -> torch.Tensor:
        tiers = Tiers(device=CPU)
        homes = SharedHomes(ranks, tiers)
        homes.make([1024])
        return homes.take()

    with two_ranks(tmp_path, timeout_s=1.5) as two:
        late = two.late(make_homes, two.second, lag_s=3.5)
        mine = make_homes(two.first)
        theirs = late.result()
        mine.zero_()
        homes = [SharedHomes(ranks, Tiers(device=CPU)) for ranks in (two.first, two.second)]

        def fill() -> None:
            theirs.fill_(7)
            homes[1].wait_until_filled()

        late = two.late(fill)
        homes[0].wait_until_filled()
        assert mine.unique().tolist() == [7]
        late.result()


def test_weights_at_home_are_written_by_a_late_owner_when_a_step_ends(two: TwoRanks) -> None:
    plan = replace(make_plan(gradients="host", state_place="host"), layout=DeviceLayout(num_devices=2, data="zero1"))
    named = {"weight": torch.nn.Parameter(torch.zeros(4))}
    steps = [
        SharedStep(ranks, replica=find_replica(ranks, plan.layout), named=named, plan=plan, at_home=["weight"])
        for ranks in (two.first, two.second)
    ]
    late = two.late(steps[1].bring_weights)
    steps[0].bring_weights()
    assert two.has_begun.is_set()
    late.result()


def test_a_stage_of_a_generation_waits_until_others_have_loaded_their_weights(two: TwoRanks) -> None:
    plan = GenerationPlan(batch_size=2, layout=GenerationLayout(stage_blocks=(1, 2)))
    late = two.late(two.second.barrier, lag_s=LOADING_S)
    with open_generator(read_model_spec(SMALL_CONFIGS["llama"]), plan=plan, ranks=two.first):
        assert two.has_begun.is_set()
    late.result()


def test_a_rank_that_does_not_come_is_lost(tmp_path: Path) -> None:
    with two_ranks(tmp_path, timeout_s=1.5) as two, pytest.raises(RankLost, match="numbers of the other ranks"):
        two.first.exchange([1.0])
