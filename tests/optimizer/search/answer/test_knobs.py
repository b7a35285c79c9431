"""A knob is one change of a plan, priced as the plan with that change is."""

import pytest

from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.search.answer.knobs import list_knobs
from optimizer.search.problem import SearchProblem
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

MACHINE = table_machine("RTX 4090")


@pytest.fixture(scope="module")
def problem(llama_profile: Profile) -> SearchProblem:
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8)
    return training_problem(llama_profile, workload=workload, goal=Goal(device_budget_bytes=2**30), machine=MACHINE)


def plan_of(problem: SearchProblem, label: str) -> Plan:
    setting, per_block = BASELINES[label](problem)
    return setting.plan(per_block)


@pytest.mark.parametrize("label", ["keep_all", "recompute_all", "offload_all", "offload_optimizer", "stream_all"])
def test_each_knob_is_the_difference_of_two_prices(problem: SearchProblem, label: str) -> None:
    plan = plan_of(problem, label)
    here = problem.price(plan)
    knobs = list_knobs(problem, plan)
    assert len(knobs) > 5
    for knob in knobs:
        there = problem.price(knob.plan)
        assert knob.device_peak_bytes == there.highest_peak_bytes
        assert knob.device_change_bytes == there.highest_peak_bytes - here.highest_peak_bytes
        assert knob.host_change_bytes == there.host_peak_bytes - here.host_peak_bytes
        assert knob.step_change_ms == there.step_ms - here.step_ms
        assert problem.find_conflict(knob.plan) is None


def test_the_largest_saving_comes_first_and_no_plan_twice(problem: SearchProblem) -> None:
    plan = plan_of(problem, "keep_all")
    knobs = list_knobs(problem, plan)
    changes = [knob.device_change_bytes for knob in knobs]
    assert changes == sorted(changes)
    plans = [knob.plan for knob in knobs]
    assert len(set(plans)) == len(plans)
    assert plan not in plans


def test_plain_training_is_offered_every_technique_that_needs_no_other_workload(problem: SearchProblem) -> None:
    offered = {knob.technique for knob in list_knobs(problem, plan_of(problem, "keep_all"))}
    assert offered >= {"recompute", "offload", "accumulate", "bf16", "fp16", "autocast", "8bit_optimizer"}
    assert offered >= {"offload_gradients", "offload_optimizer", "stream_weights"}
    assert "quantize_frozen" not in offered
    assert "consume_gradients" not in offered


def test_without_clipping_gradients_may_be_consumed(llama_profile: Profile) -> None:
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8, max_grad_norm=None)
    goal = Goal(device_budget_bytes=2**30)
    problem = training_problem(llama_profile, workload=workload, goal=goal, machine=MACHINE)
    assert "consume_gradients" in {knob.technique for knob in list_knobs(problem, plan_of(problem, "keep_all"))}


def test_what_is_forbidden_is_not_offered(llama_profile: Profile) -> None:
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8)
    goal = Goal(device_budget_bytes=2**30, forbid=("recompute", "bf16"))
    problem = training_problem(llama_profile, workload=workload, goal=goal, machine=MACHINE)
    assert not {"recompute", "bf16"} & {knob.technique for knob in list_knobs(problem, plan_of(problem, "keep_all"))}


def test_what_changes_the_numbers_is_marked(problem: SearchProblem) -> None:
    marked = {knob.change: knob.is_lossless for knob in list_knobs(problem, plan_of(problem, "keep_all"))}
    assert marked["recompute every block"]
    assert not marked["bf16 weights"]


def test_a_mixed_plan_is_offered_each_of_its_choices_for_all_blocks(problem: SearchProblem) -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=4, accumulation_steps=2),
        activations=ActivationsPlan(per_block=("keep", "recompute", "offload", "keep")),
    )
    changes = {knob.change for knob in list_knobs(problem, plan)}
    assert changes >= {
        "keep the activations of every block",
        "recompute every block",
        "micro-batches of 2 instead of 4",
        "micro-batches of 8 instead of 4",
        "offloaded activations travel in int8",
    }
