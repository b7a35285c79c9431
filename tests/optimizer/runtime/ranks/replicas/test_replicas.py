"""Several replicas of what ranks share out: the numbers of one device, and each part there once in every replica."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter
from tests.optimizer.runtime.ranks.cases import RankCase, draw_replicas, make_case
from tests.optimizer.runtime.ranks.conftest import CarryOut, answers_of
from tests.optimizer.runtime.ranks.test_memory import owners_of
from tests.optimizer.runtime.ranks.test_steps import OnOneDevice, assert_like_one_device

ON_HOST: dict[str, Any] = {"gradients": "host", "state": OptimizerStatePlan(place="host")}


def hybrid(data: str, **changes: Any) -> RankCase:
    return make_case(**{"data": data, "num_ranks": 4, "replicas": 2, "has_uneven_labels": True, **changes})


def under_adapters(data: str, **changes: Any) -> RankCase:
    return hybrid(data, adapter=Adapter(rank=4), **changes)


@pytest.mark.breadth
@pytest.mark.parametrize(
    "case",
    [
        hybrid("zero1", accumulation_steps=2),
        hybrid("zero2", accumulation_steps=3),
        hybrid("zero2", accumulation_steps=2, **ON_HOST),
        hybrid("zero2", gradients="consume"),
        hybrid("zero1", weights=WeightsPlan(place="host"), **ON_HOST),
        hybrid("zero2", weights=WeightsPlan(dtype="bf16", place="host"), accumulation_steps=2, **ON_HOST),
        hybrid("zero3", accumulation_steps=2, weights=WeightsPlan(prefetch=2)),
        hybrid("zero3", gradients="consume", activations=("recompute", "selective", "offload")),
        hybrid("zero1", state=OptimizerStatePlan(bits=8)),
        hybrid("zero3", weights=WeightsPlan(dtype="fp16"), optimizer="lion"),
        under_adapters("zero3", weights=WeightsPlan(frozen="int4")),
        under_adapters("replicated", weights=WeightsPlan(frozen="int4", place="host")),
        under_adapters("zero2", weights=WeightsPlan(place="host"), gradients="consume"),
    ],
    ids=lambda case: case.name,
)
def test_replicas_end_as_one_device_does(carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase) -> None:
    assert_like_one_device(case, carry_out, on_one_device)


@pytest.mark.breadth
@pytest.mark.parametrize("case", draw_replicas(8, has_adapters=False), ids=lambda case: case.name)
def test_drawn_plans_of_replicas_train_as_one_device_does(
    carry_out: CarryOut, on_one_device: OnOneDevice, case: RankCase
) -> None:
    assert_like_one_device(case, carry_out, on_one_device)


def test_each_replica_holds_all_of_the_state_once(carry_out: CarryOut) -> None:
    case = hybrid("zero1")
    replies, _ = carry_out(case)
    names = [set(answer["state_names"]) for answer in answers_of(replies)]
    assert names[:2] == names[2:]
    assert not names[0] & names[1]
    assert {name.rpartition("//")[0] for name in names[0] | names[1]} == set(owners_of(case))


def test_each_replica_has_one_home_of_weights_that_stream(carry_out: CarryOut, on_one_device: OnOneDevice) -> None:
    case = under_adapters("replicated", weights=WeightsPlan(place="host"))
    replies, _ = carry_out(case)
    answers = answers_of(replies)
    mapped = [answer["shared_memory"] for answer in answers]
    assert mapped[0] == mapped[1] != mapped[2] == mapped[3]
    counted = [answer["shared_part_bytes"] for answer in answers]
    assert sum(counted[:2]) == sum(counted[2:]) == on_one_device(case)[0]["home_bytes"]


def test_owners_in_several_replicas_sum_kept_gradients_once_a_step(carry_out: CarryOut) -> None:
    def count(*, steps: int, replicas: int, gradients: str = "keep") -> int:
        case = make_case(data="zero2", num_ranks=4, replicas=replicas, accumulation_steps=steps, gradients=gradients)
        replies, _ = carry_out(case)
        return sum(answer["collective_bytes"] for answer in answers_of(replies))

    # Each micro-batch reduces every gradient on all ranks, with replicas or without.
    reduced = count(steps=2, replicas=1) - count(steps=1, replicas=1)
    assert count(steps=2, replicas=2) - count(steps=1, replicas=2) == reduced
    # What leaves the device in each micro-batch is summed by its owners in each, too.
    assert count(steps=2, replicas=2, gradients="host") - count(steps=1, replicas=2, gradients="host") > reduced


def test_ranks_that_name_their_devices_may_share_weights_out_where_a_replica_is_alike(
    carry_out: CarryOut, on_one_device: OnOneDevice
) -> None:
    first, second = RankShare(micro_batch_size=1), RankShare(micro_batch_size=3)
    case = make_case(data="zero3", replicas=2, shares=(first, first, second, second), has_uneven_labels=True)
    case.plan.check(num_blocks=3, workload=case.workload)
    assert_like_one_device(case, carry_out, on_one_device)
    apart = replace(case.plan.layout, ranks=(first, second, first, second))
    conflict = replace(case.plan, layout=apart).find_conflict(workload=case.workload)
    assert conflict is not None
    assert "a replica's devices" in conflict.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 4, "data": "zero1", "replicas": 3}, "layout.replicas is 3; plan.layout.num_devices is 4, dealt out"),
        ({"num_devices": 2, "data": "zero3", "replicas": 2}, "layout.replicas is 2; plan.layout.num_devices is 2, dealt out"),
        ({"num_devices": 4, "replicas": 0}, "plan.layout.replicas is 0"),
        ({"num_devices": 2, "stage_blocks": (1, 1), "replicas": 2}, "layout.stage_blocks is 1, 1; plan.layout.replicas is 2"),
        ({"num_devices": 2, "tensor": 2, "replicas": 2}, "plan.layout.tensor is 2; plan.layout.replicas is 2"),
    ],
)
def test_a_layout_that_no_replicas_make_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        DeviceLayout(**changes)
