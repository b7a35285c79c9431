"""The search bound to the real estimator, on a real model's profile."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.every import every_plan
from optimizer.base.errors import NoFeasiblePlan
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import price_baselines
from optimizer.search.core import search
from optimizer.search.search import largest_micro_batch, search_plans
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=128, global_batch_size=2)
MACHINE = table_machine("RTX 3060 12GB", disk_bytes=0)
HEAVY_OPS = replace(MACHINE, rates=replace(MACHINE.rates, op_overhead_s=1e-9, memory_bytes_per_s=1e9))
"""So slow at computing that copies hide behind it."""
CPU = replace(MACHINE, device=replace(MACHINE.device, kind="cpu"))


OUTSIDE_BLOCKS = ("chunked_loss", "consume_gradients", "offload_gradients", "offload_optimizer", "stream_weights")


@pytest.mark.breadth
@pytest.mark.parametrize("machine", [MACHINE, HEAVY_OPS, CPU], ids=["slow link", "fast link", "cpu"])
@pytest.mark.parametrize("forbid", [OUTSIDE_BLOCKS, ("offload", "accumulate")], ids=["blocks", "levers"])
def test_the_answer_is_that_of_pricing_every_plan_at_nine_budgets(
    llama_profile: Profile, machine: Machine, forbid: tuple[str, ...]
) -> None:
    """But for half a percent, where plans differ in several levers at once; tried are fewer shares of the state and counts of
    chunks than the search knows, so it may also do better."""
    goal = Goal(device_budget_bytes=1, forbid=forbid)
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    # A price leaves out the memory that comes with the tensors on a card; ``test_card.py`` tests that.
    problem = replace(problem, price=cache(problem.price), detail=None)
    predictions = [problem.price(plan) for plan in every_plan(problem, fractions=(0.5, 1.0), chunks=(1, 4))]
    highs = [prediction.device_peak_high_bytes for prediction in predictions]
    before_ms = float("inf")
    for part in range(9):
        budget_bytes = min(highs) + (max(highs) - min(highs)) * part // 8
        budgeted = replace(problem, goal=replace(problem.goal, device_budget_bytes=budget_bytes))
        best_ms = min(prediction.step_ms for prediction in predictions if budgeted.fits(prediction))
        chosen_ms = search(budgeted).chosen.prediction.step_ms
        assert chosen_ms <= best_ms * 1.005
        assert chosen_ms <= before_ms * 1.005
        before_ms = chosen_ms


@pytest.mark.breadth
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("machine", [MACHINE, CPU], ids=["cuda", "cpu"])
def test_the_chosen_plan_is_never_slower_than_a_baseline_that_fits(
    llama_profile: Profile, machine: Machine, share: float
) -> None:
    goal = Goal(device_budget_bytes=2**40, allow_lossy=True)
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    plain_bytes = price_baselines(problem)["keep_all"].prediction.device_peak_high_bytes
    problem = replace(problem, goal=replace(goal, device_budget_bytes=round(plain_bytes * share)))
    try:
        result = search(problem)
    except NoFeasiblePlan:
        assert not any(baseline.verdict == "fits" for baseline in price_baselines(problem).values())
        return
    fitting = [baseline.prediction.step_ms for baseline in result.baselines.values() if baseline.verdict == "fits"]
    assert result.chosen.prediction.step_ms <= min(fitting, default=float("inf"))


def test_a_machine_without_a_disk_or_a_store_has_no_plans_with_one(llama_profile: Profile) -> None:
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=MACHINE)
    assert problem.choices == ("keep", "recompute", "selective", "offload")
    assert not problem.allows("disk")
    rates = replace(MACHINE.rates, disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=2e9)
    rates = replace(rates, remote_write_bytes_per_s=1e8, remote_read_bytes_per_s=1e8)
    machine = replace(MACHINE, rates=rates, disk_free_bytes=10**12, remote_free_bytes=10**9)
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=machine)
    assert problem.choices == ("keep", "recompute", "selective", "offload", "offload_remote", "offload_disk")
    assert (problem.disk_budget_bytes, problem.remote_budget_bytes) == (10**12, 10**9)
    unmeasured = replace(machine, rates=replace(rates, disk_read_bytes_per_s=None))
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=unmeasured)
    assert not problem.allows("disk")


def test_the_disk_budget_is_the_goals_but_no_more_than_the_machine_has(llama_profile: Profile) -> None:
    machine = replace(MACHINE, disk_free_bytes=1000)
    for wanted, granted in ((10, 10), (10**6, 1000), (None, 1000)):
        goal = Goal(device_budget_bytes=1, disk_budget_bytes=wanted)
        problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
        assert problem.disk_budget_bytes == granted


def test_number_formats_without_a_rate_are_not_offered(llama_profile: Profile) -> None:
    goal = Goal(device_budget_bytes=1, allow_lossy=True)
    rates = replace(MACHINE.rates, matmul_flops_per_s={"fp32": 1e12})
    problem = training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=replace(MACHINE, rates=rates))
    assert {(setting.dtype, setting.autocast) for setting in problem.settings()} == {("fp32", "off")}


def test_the_largest_micro_batch_is_the_largest_for_which_some_plan_fits(llama_profile: Profile) -> None:
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8)
    sizes = []
    for budget_bytes in (2**20, 2**21, 2**22, 2**23, 2**30):
        how = {"workload": workload, "goal": Goal(device_budget_bytes=budget_bytes), "machine": MACHINE}
        try:
            found = largest_micro_batch(llama_profile, **how)
        except NoFeasiblePlan:
            continue
        assert found.verdict == "fits"
        sizes.append(found.plan.batch.micro_batch_size)
        bigger = [size for size in (1, 2, 4, 8) if size > sizes[-1]]
        problem = training_problem(llama_profile, **how)
        for size in bigger:
            with pytest.raises(NoFeasiblePlan):
                search(replace(problem, micro_batch_size=size))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8
    assert len(set(sizes)) > 1


def test_a_batch_of_a_hundred_thousand_sequences_has_all_baselines(llama_profile: Profile) -> None:
    """Chunks of the loss stop at the most that a plan may have; the whole price ended with a plan's internals instead."""
    workload = replace(WORKLOAD, global_batch_size=100_000)
    goal = Goal(device_budget_bytes=2**34)
    problem = training_problem(llama_profile, workload=workload, goal=goal, machine=MACHINE)
    assert price_baselines(problem)["chunked_loss"].plan.logits_and_loss.num_chunks == 4096


def test_calibration_scales_time_and_leaves_bytes(llama_profile: Profile) -> None:
    goal = Goal(device_budget_bytes=2**30)
    plain = search_plans(llama_profile, workload=WORKLOAD, goal=goal, machine=MACHINE).chosen.prediction
    slowed = search_plans(
        llama_profile, workload=WORKLOAD, goal=goal, machine=MACHINE, calibration={"step_time_factor": 2.0}
    ).chosen.prediction
    assert slowed.step_ms == pytest.approx(2 * plain.step_ms)
    assert slowed.device_peak_bytes == plain.device_peak_bytes


def test_the_machines_free_host_memory_is_the_limit_unless_the_goal_says_less(llama_profile: Profile) -> None:
    machine = replace(MACHINE, host_memory_bytes=12345)
    assert (
        training_problem(
            llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=machine
        ).host_budget_bytes
        == 12345
    )
    goal = Goal(device_budget_bytes=1, host_budget_bytes=7)
    assert training_problem(llama_profile, workload=WORKLOAD, goal=goal, machine=machine).host_budget_bytes == 7


def test_8_bit_state_is_not_planned_for_a_machine_that_could_not_measure_it(llama_profile: Profile) -> None:
    rates = replace(MACHINE.rates, optimizer_elements_per_s={"adamw_32": 1e9})
    machine = replace(MACHINE, rates=rates)
    goal = Goal(device_budget_bytes=2**30, allow_lossy=True)
    result = search_plans(llama_profile, workload=WORKLOAD, goal=goal, machine=machine)
    assert all(point.plan.optimizer_state.bits == 32 for point in result.frontier)


def test_the_named_smallest_budget_is_enough(llama_profile: Profile) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        search_plans(llama_profile, workload=WORKLOAD, goal=Goal(device_budget_bytes=1), machine=MACHINE)
    smallest = Goal(device_budget_bytes=caught.value.fields["smallest_feasible_bytes"])
    assert search_plans(llama_profile, workload=WORKLOAD, goal=smallest, machine=MACHINE).chosen.verdict == "fits"
