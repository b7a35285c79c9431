"""Ranks that differ, as data: what a plan of them may say, and what each of them reads from it."""

from dataclasses import replace

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.plan import Plan
from optimizer.workload import TrainingWorkload

SMALL = RankShare(device="RTX 3060", micro_batch_size=1, per_block=("recompute", "recompute"))
LARGE = RankShare(device="RTX 4090", accumulation_steps=3)
WORKLOAD = TrainingWorkload(global_batch_size=10)


def make_plan(*ranks: RankShare, data: str = "replicated", gradients: str = "keep") -> Plan:
    return Plan(
        layout=DeviceLayout(num_devices=len(ranks), data=data, ranks=ranks),
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2),
        activations=ActivationsPlan(per_block=("keep", "keep")),
        gradients=GradientsPlan(choice=gradients),
    )


def test_a_rank_reads_its_own_batch_and_blocks_and_the_rows_where_it_says_nothing() -> None:
    small, large = make_plan(SMALL, LARGE).of_ranks()
    assert (small.batch, small.activations.per_block) == (BatchPlan(micro_batch_size=1, accumulation_steps=2), SMALL.per_block)
    assert (large.batch, large.activations.per_block) == (BatchPlan(micro_batch_size=2, accumulation_steps=3), ("keep", "keep"))


def test_a_ranks_own_plan_still_says_what_the_others_do() -> None:
    plan = make_plan(SMALL, LARGE)
    for own in plan.of_ranks():
        assert own.of_ranks() == plan.of_ranks()
        assert own.rank_sequences == (2, 6)


def test_ranks_take_stretches_of_a_step_one_after_the_other() -> None:
    plan = make_plan(SMALL, LARGE, SMALL)
    assert [plan.stretch_of(rank) for rank in range(3)] == [range(2), range(2, 8), range(8, 10)]
    plan.check(num_blocks=2, workload=WORKLOAD)


def test_a_plan_uses_the_techniques_of_all_its_ranks() -> None:
    assert "recompute" not in replace(make_plan(SMALL, LARGE), layout=DeviceLayout(num_devices=2)).techniques
    assert "recompute" in make_plan(LARGE, SMALL).techniques


def test_a_plan_of_unequal_ranks_comes_back_from_json() -> None:
    plan = make_plan(SMALL, LARGE)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_from_before_there_were_unequal_ranks_still_opens() -> None:
    document = replace(make_plan(SMALL, LARGE), layout=DeviceLayout(num_devices=2, data="zero1")).to_json()
    del document["layout"]["ranks"]
    assert Plan.from_json(document).layout == DeviceLayout(num_devices=2, data="zero1")


@pytest.mark.parametrize(
    ("plan", "workload", "message"),
    [
        (
            make_plan(SMALL, LARGE),
            WORKLOAD,
            "plan.batch makes 8 sequences per step on 2 devices; workload.global_batch_size is 10",
        ),
        (
            make_plan(SMALL, replace(LARGE, per_block=("keep",))),
            WORKLOAD,
            "plan.layout.ranks[1].per_block names 1 blocks; the model has 2",
        ),
        (make_plan(SMALL, LARGE, SMALL, data="zero2"), WORKLOAD, "layout ranks is uneven, which gives ranks other numbers of"),
        (make_plan(SMALL, LARGE, SMALL, gradients="host"), WORKLOAD, "keep them on the device, replicated or with zero1"),
    ],
)
def test_what_ranks_cannot_do_is_said_in_words(plan: Plan, workload: TrainingWorkload, message: str) -> None:
    with pytest.raises(InvalidPlan) as refused:
        plan.check(num_blocks=2, workload=workload)
    assert message in str(refused.value)


def test_gradients_that_are_consumed_need_one_micro_batch_on_each_rank() -> None:
    one = replace(make_plan(SMALL, LARGE, gradients="consume"), batch=BatchPlan(micro_batch_size=2, accumulation_steps=1))
    conflict = one.find_conflict(TrainingWorkload(max_grad_norm=None))
    assert conflict is not None
    assert "needs one micro-batch per step" in conflict.message


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((SMALL,), "plan.layout.ranks names 1 ranks; plan.layout.num_devices is 2"),
        ((SMALL, RankShare(micro_batch_size=0)), "plan.layout.ranks[1].micro_batch_size is 0; allowed: 1 or more"),
        ((RankShare(accumulation_steps=-1), SMALL), "plan.layout.ranks[0].accumulation_steps is -1; allowed: 1 or more"),
    ],
)
def test_a_layout_refuses_what_no_ranks_can_be(ranks: tuple[RankShare, ...], message: str) -> None:
    with pytest.raises(InvalidPlan, match=r"plan\.layout") as refused:
        DeviceLayout(num_devices=2, ranks=ranks)
    assert message in str(refused.value)
