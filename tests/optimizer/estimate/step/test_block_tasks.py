"""Blocks that are alike share what their tasks come to, and nothing that others wait for."""

from optimizer.estimate.categories.tensors import list_tensors
from optimizer.estimate.shape.compiled import compile_shape
from optimizer.estimate.step.block_tasks import FORWARD, BlockTasks
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.tasks.moments import moments_of
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

PLAN = Plan.from_json({"batch": {"micro_batch_size": 2, "accumulation_steps": 1}, "activations": {"per_block": ["keep"] * 4}})

WORKLOAD = TrainingWorkload(sequence_length=16, global_batch_size=2)


def make_tasks(profile: Profile, machine: Machine) -> BlockTasks:
    compiled = compile_shape(profile, PLAN.weights, (2, 16))
    moments = moments_of(list_tensors(profile).sizes, bits=32, kept=WORKLOAD.kept_state)
    prices = PartPrices.find(compiled, plan=PLAN, machine=machine, moments=moments)
    assert PartPrices.find(compiled, plan=PLAN, machine=machine, moments=moments) is prices
    return BlockTasks.find(prices, compress="none")


def test_a_task_of_a_block_is_that_of_the_blocks_like_it_but_for_what_waits_for_it(
    profile: Profile, machine: Machine
) -> None:
    tasks = make_tasks(profile, machine).list_forward(["recompute"] * 4, {})
    assert [task.block for task in tasks] == [0, 1, 2, 3]
    assert len({task.waits_for for task in tasks}) == 4
    assert tasks[1].bytes is tasks[2].bytes
    assert tasks[1].time is tasks[2].time
    assert tasks[1].totals == tasks[2].totals


def test_an_offloaded_block_begins_what_the_one_before_it_saved(profile: Profile, machine: Machine) -> None:
    choices = ["offload", "keep", "offload", "offload"]
    tasks = make_tasks(profile, machine).list_backward(choices, {}, "backward_first", is_first=True)
    assert [[transfer.key for transfer in task.arrives] for task in tasks] == [[("saved", 0)], [], [("saved", 2)], [("saved", 3)]]
    assert [[transfer.key for transfer in task.begins] for task in tasks] == [[], [], [("saved", 0)], [("saved", 2)]]


def test_the_same_choice_is_the_same_task(profile: Profile, machine: Machine) -> None:
    tasks = make_tasks(profile, machine)
    first, second = (tasks.list_forward(choices, {}) for choices in (["keep"] * 4, ["keep", "recompute", "keep", "keep"]))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, False, True, True]
    assert first[0].phase == FORWARD
