"""The ledger that adds up a chosen plan's bytes by itself, held against the estimator; and a search that is held to it."""

import random
from dataclasses import replace

import pytest

from benchmarks.search.profiles import with_depth
from benchmarks.search.small import draw_machine
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.profile.profile import Profile
from optimizer.search.check.ledger import audit_plan, follows
from optimizer.search.check.verify import VerificationFailed
from optimizer.search.core import search
from optimizer.search.problem import OuterPlan
from optimizer.search.training import training_problem
from optimizer.workload import TrainingWorkload


@pytest.mark.parametrize("seed", range(6))
def test_estimates_of_plans_drawn_by_chance_are_those_of_the_ledger_to_the_byte(
    llama_profile: Profile, seed: int
) -> None:
    draw = random.Random(f"ledger {seed}")
    profile = with_depth(llama_profile, draw.randint(2, 6))
    _, machine = draw_machine(draw)
    workload = TrainingWorkload(
        sequence_length=draw.choice([32, 64, 128]), global_batch_size=4, optimizer=draw.choice(["adamw", "sgd"])
    )
    goal = Goal(device_budget_bytes=1, allow_lossy=True)
    problem = training_problem(profile, workload=workload, goal=goal, machine=machine)
    settings = [setting for setting in problem.settings() if setting.bits == 32]
    for _ in range(10):
        blocks = tuple(draw.choice(("keep", "recompute", "selective", "offload")) for _ in range(profile.num_blocks))
        plan = draw.choice(settings).plan(blocks)
        assert follows(profile, plan)
        found = audit_plan(profile, plan=plan, prediction=problem.price(plan), workload=workload, machine=machine)
        assert found == ()


def test_a_wrong_byte_and_an_impossible_time_are_found(llama_profile: Profile) -> None:
    workload, machine = TrainingWorkload(sequence_length=64, global_batch_size=2), table_machine("RTX 3060 12GB")
    problem = training_problem(llama_profile, workload=workload, goal=Goal(device_budget_bytes=1), machine=machine)
    plan = OuterPlan(micro_batch_size=2, accumulation_steps=1).plan(("keep",) * llama_profile.num_blocks)
    right = problem.price(plan)
    sizes = {**right.device_bytes_by_category, "activations": right.device_bytes_by_category["activations"] - 1}
    wrong = replace(right, device_bytes_by_category=sizes, host_peak_bytes=5, step_ms=right.step_ms / 2)
    found = audit_plan(llama_profile, plan=plan, prediction=wrong, workload=workload, machine=machine)
    assert ["ms of work on compute" in found[0], "at the peak, not" in found[1], "of the host" in found[2]] == [True] * 3


def test_the_ledger_says_what_it_does_not_follow(llama_profile: Profile) -> None:
    blocks = ("keep",) * llama_profile.num_blocks
    plain = OuterPlan(micro_batch_size=2, accumulation_steps=1)
    assert follows(llama_profile, plain.plan(blocks))
    for changed in (replace(plain, num_chunks=2), replace(plain, gradients="host"), replace(plain, bits=8)):
        assert not follows(llama_profile, changed.plan(blocks))


def test_a_search_whose_plans_the_ledger_contradicts_says_so(llama_profile: Profile) -> None:
    workload, machine = TrainingWorkload(sequence_length=64, global_batch_size=1), table_machine("RTX 3060 12GB")
    goal = Goal(device_budget_bytes=2**30, forbid=("chunked_loss", "offload_gradients"))
    problem = training_problem(llama_profile, workload=workload, goal=goal, machine=machine)
    with pytest.raises(VerificationFailed, match="another count"):
        search(replace(problem, detail=None, audit=lambda plan, prediction: ("is by another count larger",)))
