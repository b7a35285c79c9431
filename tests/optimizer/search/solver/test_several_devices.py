"""Bounds, exhaustive search and the ledger hold for plans on two devices as they do on one."""

import random
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.search.every import every_plan
from benchmarks.search.small import compare, draw_machine
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.plan.devices.layout import DATA_PARALLEL, DataParallel, DeviceLayout
from optimizer.profile.profile import Profile
from optimizer.search.check.ledger import audit_plan, follows
from optimizer.search.problem import OuterPlan, SearchProblem
from optimizer.search.solver.grid import MAX_PREFETCH, chunk_counts
from optimizer.search.solver.relaxed import bound_relaxed
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=8)
NUM_PLANS = 30


def draw_pair(draw: random.Random) -> Machine:
    """Two devices with a link that is anything from much slower to much faster than they are."""
    _, machine = draw_machine(draw)
    link = PeerLink(
        kind="host", bytes_per_s=draw.choice([1e7, 1e9, 1e11]), latency_s=draw.choice([1e-6, 1e-4]), source="measured"
    )
    return replace(machine, num_devices=2, peers=link)


def make_problem(draw: random.Random, profile: Profile, data: DataParallel, *, forbid: tuple[str, ...] = ()) -> SearchProblem:
    goal = Goal(device_budget_bytes=1, forbid=forbid, num_devices=2)
    layout = DeviceLayout(num_devices=2, data=data)
    workload = replace(WORKLOAD, max_grad_norm=draw.choice([None, 1.0]))
    return training_problem(profile, workload=workload, goal=goal, machine=draw_pair(draw), layout=layout)


@pytest.mark.breadth
@pytest.mark.parametrize("data", DATA_PARALLEL)
def test_two_devices_are_answered_as_by_trying_every_plan(llama_profile: Profile, data: DataParallel) -> None:
    draw = random.Random(f"two devices {data}")
    forbid = ("chunked_loss", "offload_gradients", "stream_weights", "offload", "disk")
    problem = make_problem(draw, llama_profile, data, forbid=forbid)
    problem = replace(problem, price=cache(problem.price), detail=None)
    plans = [(plan, problem.price(plan)) for plan in every_plan(problem)]
    highs = [prediction.device_peak_high_bytes for _, prediction in plans]
    for _ in range(4):
        row = compare(problem.with_budget(draw.randint(min(highs) - 1, max(highs))), plans)
        assert row["optimal"], row
        assert row["proven"], row


@pytest.mark.parametrize("data", DATA_PARALLEL)
def test_no_plan_of_two_devices_is_faster_or_smaller_than_its_settings_bound(
    llama_profile: Profile, data: DataParallel
) -> None:
    draw = random.Random(f"bounds of two devices {data}")
    tightness = []
    for index in range(NUM_PLANS):
        if index % 6 == 0:
            problem = make_problem(draw, llama_profile, data)
        setting = draw_setting(draw, problem)
        per_block = tuple(draw.choice(problem.choices) for _ in range(problem.num_blocks))
        plan = setting.plan(per_block)
        prediction = problem.price(plan)
        counts = chunk_counts(setting, tokens=WORKLOAD.sequence_length)
        free = setting.state_place != "device" and setting.weights_place == "device" and draw.random() < 0.7
        found = problem.relax.setting(setting, forms=problem.forms, chunk_counts=counts, state_is_free=free)
        bounds = bound_relaxed(found, budget_bytes=prediction.device_peak_high_bytes)
        bound_ms = bounds[counts.index(setting.num_chunks)]
        assert bound_ms <= prediction.step_ms, plan
        assert problem.relax.base_ms(setting.base) <= prediction.step_ms, plan
        assert problem.audit(plan, prediction) == (), plan
        tightness.append(bound_ms / prediction.step_ms)
    assert max(tightness) > 0.9


def draw_setting(draw: random.Random, problem: SearchProblem) -> OuterPlan:
    while True:
        setting = replace(
            draw.choice(problem.settings()),
            gradients=draw.choice(["keep", "keep", "consume", "host"]),
            state_place=draw.choice(["device", "host", "disk"]),
            state_fraction=draw.choice([1.0, 0.5]),
            weights_place=draw.choice(["device", "host"]),
            prefetch=draw.randint(0, MAX_PREFETCH),
        )
        if setting.state_place == "device" or setting.weights_place != "device":
            setting = replace(setting, state_fraction=1.0)
        if problem.permits_setting(setting):
            counts = chunk_counts(setting, tokens=WORKLOAD.sequence_length)
            return replace(setting, num_chunks=draw.choice(counts))


@pytest.mark.parametrize("data", DATA_PARALLEL)
def test_the_ledger_finds_the_bytes_of_the_highest_rank(llama_profile: Profile, data: DataParallel) -> None:
    problem = make_problem(random.Random(f"ledger {data}"), llama_profile, data)
    setting = OuterPlan(micro_batch_size=4, accumulation_steps=1, layout=problem.layout)
    for choice in ("keep", "recompute", "offload"):
        plan = setting.plan((choice,) * problem.num_blocks)
        prediction = problem.price(plan)
        assert follows(llama_profile, plan)
        assert problem.audit(plan, prediction) == ()
        wrong = replace(prediction, device_bytes_by_category={"weights": prediction.device_peak_bytes})
        machine = draw_pair(random.Random(0))
        assert audit_plan(llama_profile, plan=plan, prediction=wrong, workload=problem.whole_workload, machine=machine) != ()
