"""Ranks with other versions, or another plan, refuse each other where they meet."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from optimizer.base.errors import RanksDiffer
from optimizer.runtime.ranks import alike
from optimizer.runtime.ranks.alike import RankFacts, require_alike
from optimizer.runtime.ranks.group import RankPlace, Ranks

CPU = torch.device("cpu")


def meet(folder: Path, *, plans: tuple[str, str] = ("p", "p")) -> list[str]:
    """The words of each of two ranks; empty where they meet."""

    def join(rank: int) -> str:
        place = RankPlace(rank=rank, num_ranks=2, folder=folder, timeout_s=20, machine=("home", "office")[rank])
        try:
            ranks = Ranks(place, device=CPU, plan=plans[rank])
            ranks.barrier()  # else the first closes connections that the second still makes
            ranks.close()
        except RanksDiffer as error:
            return error.message
        return ""

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(join, range(2)))


def test_ranks_of_one_version_and_plan_meet(tmp_path: Path) -> None:
    assert meet(tmp_path) == ["", ""]


def test_ranks_of_other_versions_say_so_on_both_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["0.1.0", "0.2.0"])
    monkeypatch.setattr(alike, "_program_version", lambda: next(versions))
    said = meet(tmp_path)
    assert said[0] == said[1]
    # Threads begin in no order, so either may have had the first of the two.
    assert said[0].replace("0.2.0", "0.1.0") == (
        "rank 1 on office has Headroom 0.1.0, and rank 0 on home has Headroom 0.1.0; the ranks of a run need the same"
    )
    assert {"0.1.0", "0.2.0"} <= set(said[0].replace(",", "").replace(";", "").split())


def test_ranks_of_other_plans_say_so(tmp_path: Path) -> None:
    assert meet(tmp_path, plans=("a1", "b2")) == [
        "rank 1 on office has plan b2, and rank 0 on home has plan a1; the ranks of a run need the same"
    ] * 2


@pytest.mark.parametrize("what", ["torch", "NCCL"])
def test_each_version_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    own = RankFacts.find(computer="c", machine="home", device=torch.device("cuda"), plan="p")
    require_alike([own, own])
    other = RankFacts(computer="d", machine="office", alike={**own.alike, what: "1.0"})
    with pytest.raises(RanksDiffer, match=f"rank 2 on office has {what} 1.0, and rank 0 on home has {what} "):
        require_alike([own, own, other])
