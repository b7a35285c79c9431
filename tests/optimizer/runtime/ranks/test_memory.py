"""Bytes on each rank: what it owns and nothing else, and nothing for what ranks say to each other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.formats.ownership import assign_owners
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from tests.optimizer.runtime.ranks.cases import RankCase, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of, read_state, read_weights
from tests.optimizer.runtime.ranks.rank_process import carry_out_steps


def owners_of(case: RankCase) -> dict[str, int]:
    named = {name: p.numel() for name, p in case.make_model().named_parameters() if p.requires_grad}
    return dict(zip(named, assign_owners(list(named.values()), num_ranks=case.num_ranks), strict=True))


@pytest.mark.parametrize(
    ("state", "dtype", "gradients"),
    [
        (OptimizerStatePlan(), "fp32", "keep"),
        (OptimizerStatePlan(), "bf16", "consume"),
        (OptimizerStatePlan(bits=8), "fp32", "keep"),
    ],
    ids=["fp32", "bf16", "8-bit"],
)
def test_a_rank_holds_the_state_of_its_own_tensors_alone(
    carry_out: CarryOut, tmp_path: Path, state: OptimizerStatePlan, dtype: str, gradients: str
) -> None:
    case = make_case(data="zero1", gradients=gradients, state=state, weights=WeightsPlan(dtype=dtype))
    replies, folder = carry_out(case)
    answers = answers_of(replies)
    carry_out_steps(case.on_one_device, ranks=None, folder=tmp_path)
    owners, whole = owners_of(case), read_state(tmp_path)
    for rank, answer in enumerate(answers):
        mine = {name: tensor for name, tensor in whole.items() if owners[name.rpartition("//")[0]] == rank}
        assert answer["state_names"] == sorted(mine)
        # The tables of 8-bit values are bitsandbytes' own, 256 numbers each, on each rank.
        tables_bytes = 2 * 1024 if state.bits == 8 else 0
        assert answer["state_bytes"] == sum(tensor.nbytes for tensor in mine.values()) + tables_bytes
        assert answer["gradient_bytes"] == (4 * len({name.rpartition("//")[0] for name in mine}) if gradients == "consume" else 0)
    assert read_weights(folder).keys() == owners.keys()


def test_state_on_the_host_is_on_its_owner_alone(carry_out: CarryOut) -> None:
    state = OptimizerStatePlan(place="host")
    shared, _ = carry_out(make_case(data="zero2", gradients="host", state=state))
    replicated, _ = carry_out(make_case(data="replicated", gradients="host", state=state))
    parts = [answer["host_state_bytes"] for answer in answers_of(shared)]
    whole = answers_of(replicated)[0]["host_state_bytes"]
    assert sum(parts) == whole
    assert max(parts) < 0.7 * whole


@pytest.mark.parametrize("gradients", ["keep", "host"])
def test_the_peak_of_ranks_that_share_nothing_is_one_devices(
    carry_out: CarryOut, tmp_path: Path, gradients: str
) -> None:
    """Expect the memory of the same micro-batches; sums and numbers that cross take no memory that the meter sees."""
    case = make_case(gradients=gradients, accumulation_steps=2)
    replies, _ = carry_out(case)
    alone = replace(
        case, plan=replace(case.plan, layout=DeviceLayout()), workload=case.workload.of_rank(case.num_ranks)
    )
    expected = carry_out_steps(alone, ranks=None, folder=tmp_path)
    for answer in answers_of(replies):
        assert answer["peaks"] == expected["peaks"]
        assert answer["peak_by_category"] == expected["peak_by_category"]


def test_gradients_of_tensors_that_others_own_go_as_they_appear(carry_out: CarryOut) -> None:
    """Each step's peak of gradients: whole with zero1 while micro-batches add up, the owned ones with zero2."""
    found: dict[str, list[dict[str, Any]]] = {}
    for data in ("replicated", "zero1", "zero2", "zero3"):
        replies, _ = carry_out(make_case(data=data, accumulation_steps=2))
        found[data] = answers_of(replies)
    assert found["replicated"][0]["collective_bytes"] < found["zero2"][0]["collective_bytes"]
    highest: Callable[[str], int] = lambda data: max(answer["peaks"][-1] for answer in found[data])  # noqa: E731
    assert highest("zero3") < highest("zero2") < highest("zero1") < highest("replicated")
