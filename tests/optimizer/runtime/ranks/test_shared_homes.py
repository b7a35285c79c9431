"""Weights that stream to several ranks from one home: the numbers of one device, one copy, and nobody too early or too late."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.units import MIB
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of
from tests.optimizer.runtime.ranks.pool import RankPool
from tests.optimizer.runtime.ranks.rank_process import list_dev_shm, list_shared_memory
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice, assert_equal_on_all, assert_like_one_device

ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}


def streamed(data: str, *, dtype: str = "fp32", **changes: Any) -> RankCase:
    """All weights are trained."""
    weights = WeightsPlan(place="host", dtype=dtype, master=changes.pop("master", "fp32"))
    return make_case(**{"data": data, "weights": weights, **ON_HOST, **changes})


def under_adapters(data: str, *, frozen: str = "same", place: str = "host", **changes: Any) -> RankCase:
    return make_case(data=data, weights=WeightsPlan(place=place, frozen=frozen), adapter=Adapter(rank=4), **changes)


def assert_one_copy(answers: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All ranks have mapped the same memory, and the bytes that they count of it together are one device's homes."""
    mapped = [answer["shared_memory"] for answer in answers]
    assert mapped == [mapped[0]] * len(answers)
    ((_, mapped_bytes),) = mapped[0]
    counted = [answer["shared_part_bytes"] for answer in answers]
    home_bytes = alone["home_bytes"]
    assert sum(counted) == home_bytes
    assert max(counted) - min(counted) <= 1
    assert home_bytes <= mapped_bytes < 1.2 * home_bytes
    assert alone["shared_memory"] == []


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        streamed("zero1", has_uneven_labels=True),
        streamed("zero2", dtype="bf16"),
        streamed("zero1", dtype="bf16", master="none"),
        streamed("zero2", dtype="fp16", optimizer="lion"),
        streamed("zero1", state=OptimizerStatePlan(place="disk"), activations=("offload", "recompute", "selective")),
        streamed("zero2", num_ranks=4, accumulation_steps=2),
        streamed("zero1", model="shared", activations=("keep",) * 4),
        streamed("zero1", num_ranks=4, activations=("keep",), trains="norm.weight"),
    ],
    ids=["zero1", "masters", "no-masters", "fp16-lion", "state-on-disk", "four", "shared-blocks", "few-trained"],
)
def test_trained_weights_with_one_home_end_as_on_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    answers = assert_like_one_device(case, carry_out, on_one_device)
    if case.model != "shared":
        assert_one_copy(answers, on_one_device(case)[0])


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        under_adapters("replicated"),
        under_adapters("zero2", frozen="int4"),
        under_adapters("zero1", frozen="int8", gradients="host", state=OptimizerStatePlan(place="host")),
        under_adapters("replicated", frozen="int4", gradients="consume"),
    ],
    ids=["plain", "int4", "int8-host", "consumed"],
)
def test_frozen_weights_with_one_home_train_adapters_as_on_one_device(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_one_copy(assert_like_one_device(case, carry_out, on_one_device), on_one_device(case)[0])


def test_frozen_weights_on_the_disk_go_with_shared_state(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    answers = assert_like_one_device(under_adapters("zero1", place="disk"), carry_out, on_one_device)
    assert [answer["shared_memory"] for answer in answers] == [[], []]


def test_ranks_that_each_update_all_weights_have_homes_of_their_own(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    answers = assert_like_one_device(streamed("replicated"), carry_out, on_one_device)
    assert [answer["shared_memory"] for answer in answers] == [[], []]
    assert [answer["shared_part_bytes"] for answer in answers] == [0, 0]


@pytest.mark.breadth
@pytest.mark.parametrize("what", ["update", "fetch"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_finds_no_weight_too_new_and_the_other_none_too_old(
    carry_out: CarryOut, on_one_device: OnOneDevice, what: str, late: int
) -> None:
    # Trains nothing outside blocks, which would be sent, and waited for.
    case = streamed("zero1", trains="proj.weight")
    replies, _ = carry_out(case, lags=[late, what])
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    expected, _ = on_one_device(case)
    assert answers[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    # Each step begins with an exchange; an evaluation does not wait for others before it reads.
    assert answers[0]["validation_loss"] == expected["validation_loss"]
    assert answers[0]["weights_sha256"] == expected["weights_sha256"]


def test_an_overflow_leaves_the_one_home_as_it_was(carry_out: CarryOut) -> None:
    replies, _ = carry_out(streamed("zero1", dtype="fp16"), spoils=[1, 1])
    answers = answers_of(replies)
    assert_equal_on_all(answers)
    assert answers[0]["left_out"][1]


def test_new_weights_at_home_do_not_cross_the_network(carry_out: CarryOut) -> None:
    """All gradients do, once; of the weights those of no block."""
    case = streamed("zero1")
    replies, _ = carry_out(case)
    named = {name: p.numel() for name, p in case.make_model().named_parameters()}
    in_blocks = sum(size for name, size in named.items() if "layers." in name)
    expected = 3 * 4 * (2 * sum(named.values()) - in_blocks)
    assert [answer["collective_bytes"] for answer in answers_of(replies)] == [expected] * 2


def test_ranks_with_other_weights_are_refused_by_name(pool: RankPool) -> None:
    replies = pool.run({"kind": "homes", "sizes": [[512, 1024], [512]]}, num_ranks=2)
    assert [reply["error"]["code"] for reply in replies] == ["ranks_differ"] * 2
    assert "rank 0: 2 tensors, rank 1: 1 tensors, 1536 bytes on rank 0" in replies[0]["error"]["message"]


def test_too_little_memory_is_an_error_of_all_ranks(pool: RankPool) -> None:
    first, second = pool.run({"kind": "homes", "sizes": [[2**50]] * 2}, num_ranks=2)
    assert first["error"]["code"] == "out_of_host_memory"
    assert second["error"]["code"] == "shared_memory_refused"
    assert "another rank has no memory to share: host memory ran out" in second["error"]["message"]


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[RankPool]:
    """A group of processes that a test may kill."""
    pool = RankPool(tmp_path, num_ranks=2)
    yield pool
    pool.close()


def test_ranks_killed_while_they_share_a_home_leave_nothing(own_pool: RankPool) -> None:
    before = list_dev_shm()
    processes = own_pool.processes
    own_pool.begin({"kind": "homes", "sizes": [[64 * MIB]] * 2, "holds_s": 600}, num_ranks=2)
    mapped = _wait_for(lambda: [list_shared_memory(str(process.pid)) for process in processes], until=all)
    assert mapped[0] == mapped[1]
    assert mapped[0][0][1] == 64 * MIB
    assert list_dev_shm() == before
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    assert [process.wait(timeout=30) for process in processes] == [-signal.SIGKILL] * 2
    assert list_dev_shm() == before
    inode = mapped[0][0][0]
    assert not any(inode == other for maps in _all_shared() for other, _ in maps)


def _all_shared() -> Iterator[list[list[int]]]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield list_shared_memory(process.name)
        except OSError:
            continue


def _wait_for(look: Callable[[], list[Any]], *, until: Callable[[list[Any]], bool]) -> list[Any]:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if until(found := look()):
            return found
        time.sleep(0.02)
    raise AssertionError("not within a minute")
