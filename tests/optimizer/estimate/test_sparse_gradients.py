"""Models with sparse embedding gradients are priced from above, closely, and searched within what they allow."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.training import estimate_training
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.runtime.job.measure import measure_step
from optimizer.search.answer.baselines import price_baselines
from optimizer.search.search import search_plans
from optimizer.search.training import training_problem
from tests.optimizer.profiles import extent_of, trace
from tests.optimizer.runtime.step.test_sparse_gradients import DENSE_SPEC, REFUSED, SPEC, WORKLOAD, make_plan


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trace(SPEC)


@pytest.mark.parametrize(("field", "rows"), REFUSED)
def test_what_cannot_be_combined_is_refused(
    profile: Profile, machine: Machine, field: str, rows: dict[str, Any]
) -> None:
    workload = replace(WORKLOAD, max_grad_norm=None)
    with pytest.raises(InvalidPlan, match="sparse_embedding_gradients"):
        estimate_training(profile, plan=make_plan(**rows), workload=workload, machine=machine)


@pytest.mark.breadth
@pytest.mark.parametrize("num_chunks", [1, 8])
@pytest.mark.parametrize("choice", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_the_predicted_peak_is_a_close_upper_bound(
    profile: Profile, machine: Machine, choice: str, accumulation_steps: int, num_chunks: int
) -> None:
    plan = make_plan(accumulation_steps, choice=choice, logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks))
    predicted = estimate_training(profile, plan=plan, workload=WORKLOAD, machine=machine).device_peak_bytes
    measured = measure_step(SPEC, plan=plan, workload=WORKLOAD).device_peak_bytes
    assert measured <= predicted <= 1.02 * measured


@pytest.mark.parametrize("accumulation_steps", [1, 16, 64])
def test_many_rows_of_few_tokens_at_a_time_are_bounded_where_they_are_joined_and_updated(
    profile: Profile, machine: Machine, accumulation_steps: int
) -> None:
    workload = replace(WORKLOAD, global_batch_size=64)
    plan = Plan(
        batch=BatchPlan(micro_batch_size=64 // accumulation_steps, accumulation_steps=accumulation_steps),
        activations=ActivationsPlan(per_block=("recompute",) * 2),
        logits_and_loss=LogitsAndLossPlan(num_chunks=8),
    )
    predicted = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    measured = measure_step(SPEC, plan=plan, workload=workload)
    peak_bytes = measured.device_peak_bytes
    assert peak_bytes <= predicted.device_peak_bytes <= 1.08 * peak_bytes
    if accumulation_steps == 64:
        assert predicted.peak_moment in ("gradient clipping", "optimizer step")
        rows_bytes = workload.tokens_per_step * (32 * 4 + 8)
        assert measured.device_bytes_by_category["gradients"] >= rows_bytes


def test_the_peak_is_below_that_with_dense_gradients(profile: Profile, machine: Machine) -> None:
    plan = make_plan(4)
    extent = extent_of([(make_plan(4), WORKLOAD)])
    dense = estimate_training(trace(DENSE_SPEC, extent=extent), plan=plan, workload=WORKLOAD, machine=machine)
    sparse = estimate_training(profile, plan=plan, workload=WORKLOAD, machine=machine)
    saved_bytes = 997 * 32 * 4 - 3 * WORKLOAD.sequence_length * (32 * 4 + 8)
    assert sparse.device_peak_bytes <= dense.device_peak_bytes - 0.9 * saved_bytes


def test_the_search_finds_a_plan_that_can_be_carried_out(profile: Profile, machine: Machine) -> None:
    whole = estimate_training(profile, plan=make_plan(), workload=WORKLOAD, machine=machine)
    goal = Goal(device_budget_bytes=round(0.7 * whole.device_peak_bytes))
    found = search_plans(profile, workload=WORKLOAD, goal=goal, machine=machine)
    found.chosen.plan.check(num_blocks=2, workload=WORKLOAD, has_sparse_gradients=True)
    problem = training_problem(profile, workload=WORKLOAD, goal=goal, machine=machine)
    assert "offload_optimizer" not in price_baselines(problem)
