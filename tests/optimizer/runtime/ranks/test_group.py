"""Ranks exchange tensors and numbers; and what happens where one is missing."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import InvalidInput, RankLost
from optimizer.runtime.ranks import group
from optimizer.runtime.ranks.group import RankPlace, Ranks
from tests.optimizer.runtime.ranks.conftest import answers_of
from tests.optimizer.runtime.ranks.pool import RankPool


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_sum_send_and_compare(pool: RankPool, num_ranks: int) -> None:
    answers = answers_of(pool.run({"kind": "group"}, num_ranks=num_ranks))
    total = float(sum(range(1, num_ranks + 1)))
    last = num_ranks - 1
    for rank, answer in enumerate(answers):
        assert answer["everywhere"] == {dtype: [[total] * 3] * 2 for dtype in ("float32", "bfloat16", "float16")}
        assert answer["turned"] == [[0.0, 3 * total], [total, 4 * total], [2 * total, 5 * total]]
        assert answer["from_last"] == [float(last)] * 5
        assert answer["exchanged"] == [
            [str(float(other)), str(2.0**53), "inf" if other == last else "0.5"] for other in range(num_ranks)
        ]
        assert answer["facts"] == [{"rank": other, "word": "a" * other} for other in range(num_ranks)]
        assert answer["first"] == [7.0]
        assert answer["received"] == [index * last if rank == 0 else 0 for index in range(7)]
        assert answer["num_bytes"] == 6 * (4 + 2 + 2) + 6 * 4 + 5 * 4 + 5 * 4
        assert answer["network_ms"] > 0
    assert answers[last]["on_last"] == [total] * 5


def test_numbers_and_facts_cross_in_memory_that_no_meter_counts(pool: RankPool) -> None:
    for answer in answers_of(pool.run({"kind": "group"}, num_ranks=2)):
        assert answer["metered_bytes"] == 0


def test_ranks_meet_on_the_interface_that_is_named_and_one_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(**named: str) -> str:
        place = RankPlace(rank=0, num_ranks=1, folder=tmp_path / str(len(named)), timeout_s=10, **named)
        with Ranks(place, device=torch.device("cpu")) as ranks:
            return ranks.interface

    assert meet() == "lo"
    monkeypatch.setenv("HEADROOM_RANK_INTERFACE", "eth77")
    assert meet(interface="lo") == "lo"
    with pytest.raises(InvalidInput, match=r"network interface 'eth77' is not on this machine; present: lo") as caught:
        meet()
    assert caught.value.fields["field"] == "HEADROOM_RANK_INTERFACE"


def test_a_rank_whose_others_never_start_says_so_in_time(tmp_path: Path) -> None:
    place = RankPlace(rank=0, num_ranks=2, folder=tmp_path / "nobody", timeout_s=0.5)
    start_s = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 0 of 2 waited .* for the others to start") as caught:
        Ranks(place, device=torch.device("cpu"))
    assert time.monotonic() - start_s < 10
    assert caught.value.code == "rank_lost"
    assert caught.value.fields["num_ranks"] == 2


def test_a_rank_that_is_gone_before_anything_is_sent_to_it_is_lost_like_any_other(tmp_path: Path) -> None:
    def meet(rank: int) -> Ranks:
        return Ranks(RankPlace(rank=rank, num_ranks=2, folder=tmp_path, timeout_s=20), device=torch.device("cpu"))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, range(2))
    second.close()
    words = torch.ones(4)
    asked = (
        lambda: first.send(words, to=1),
        lambda: first.receive(words, source=1),
        lambda: first.begin_sending([1], to=1, tag=7).wait(),
        lambda: first.receive_integers(1, source=1, tag=7),
        lambda: first.begin_sending_from_device(words, to=1).wait(),
        lambda: first.receive_on_device(words, source=1),
    )
    with pytest.raises(RankLost):  # the connection is closed once this has ended
        first.receive(words, source=1)
    for each in asked:
        with pytest.raises(RankLost, match=r"rank 0 of 2 waited .* for rank 1 to "):
            each()
    first.close()


def test_a_rank_on_the_loopback_says_that_it_cannot_reach_another_computer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computers = iter(["one", "two"])
    monkeypatch.setattr(group, "read_boot_id", lambda: next(computers))

    def meet(rank: int) -> str:
        place = RankPlace(rank=rank, num_ranks=2, folder=tmp_path, timeout_s=20)
        with pytest.raises(InvalidInput) as caught:
            Ranks(place, device=torch.device("cpu"))
        return caught.value.message

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(meet, range(2)))
    assert said[0] == "rank 0 would reach the others by lo, and rank 1 is on another computer"
    assert said[1] == "rank 1 would reach the others by lo, and rank 0 is on another computer"
