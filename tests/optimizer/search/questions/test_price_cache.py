"""Prices that outlive a search are those that a new search would find."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.plan.plan import Plan
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.search.questions.objectives import answer_goal
from optimizer.search.questions.price_cache import MAX_WORKLOADS, PriceMemory, detailed_part, priced_part
from optimizer.search.training import training_problem
from optimizer.workload import Adapter, Export, TrainingWorkload

MIB = 1024**2
WORK = TrainingWorkload(sequence_length=128, global_batch_size=4, num_steps=10)
GOAL = Goal(device_budget_bytes=5 * MIB, forbid=("offload", "offload_optimizer", "offload_gradients", "stream_weights"))
PLAIN = Plan.from_json(
    {"batch": {"micro_batch_size": 4, "accumulation_steps": 1}, "activations": {"per_block": ["keep"] * 4}}
)


def ask(
    profile: Profile, *, goal: Goal = GOAL, workload: TrainingWorkload = WORK, memory: PriceMemory | None = None
) -> ObjectiveAnswer:
    def pose(profile: Profile, workload: TrainingWorkload) -> Any:
        problem = training_problem(profile, workload=workload, goal=goal, machine=table_machine("T4"))
        return problem if memory is None else memory.bind(problem)

    return answer_goal(pose, profile, workload)


@pytest.mark.parametrize(
    ("goal", "workload"),
    [
        (replace(GOAL, device_budget_bytes=1024 * MIB), WORK),
        (GOAL, replace(WORK, num_steps=99)),
        (replace(GOAL, allow_lossy=True), replace(WORK, learning_rate=1e-2)),
    ],
)
def test_an_answer_from_memory_is_the_answer_of_a_new_search(
    llama_profile: Profile, goal: Goal, workload: TrainingWorkload
) -> None:
    memory = PriceMemory()
    ask(llama_profile, memory=memory)
    remembered = ask(llama_profile, goal=goal, workload=workload, memory=memory)
    assert remembered.to_json() == ask(llama_profile, goal=goal, workload=workload).to_json()


def test_what_was_priced_is_not_priced_again(llama_profile: Profile) -> None:
    memory, asked = PriceMemory(), []
    problem = training_problem(llama_profile, workload=WORK, goal=GOAL, machine=table_machine("T4"))

    def price(plan: Plan) -> Any:
        asked.append(plan)
        return problem.price(plan)

    first, second = (memory.bind(replace(problem, price=price)) for _ in range(2))
    assert first.price(PLAIN) is second.price(PLAIN)
    assert asked == [PLAIN]


def test_only_the_newest_of_many_workloads_are_kept(llama_profile: Profile) -> None:
    memory, asked = PriceMemory(), []
    machine = table_machine("T4")

    def bound(length: int) -> Any:
        problem = training_problem(llama_profile, workload=replace(WORK, sequence_length=length), goal=GOAL, machine=machine)
        return memory.bind(replace(problem, price=lambda plan: asked.append(length) or problem.price(plan)))

    lengths = [64 + 8 * index for index in range(MAX_WORKLOADS + 1)]
    for length in [*lengths, lengths[-1], lengths[0]]:
        bound(length).price(PLAIN)
    assert asked == [*lengths, lengths[0]]


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 64},
        {"global_batch_size": 8},
        {"optimizer": "sgd"},
        {"momentum": 0.0},
        {"max_grad_norm": None},
        {"eval_batches": 1},
        {"num_steps": 1},
        {"adapter": Adapter()},
    ],
)
def test_what_a_price_reads_is_kept_apart(change: dict[str, Any]) -> None:
    assert priced_part(replace(WORK, **change)) != priced_part(WORK)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-2, "schedule": "linear", "warmup_steps": 3, "weight_decay": 0.0},
        {"seed": 7, "eval_every_steps": 1, "checkpoint_every_steps": 1, "sample_tokens": 0},
        {"beta1": 0.5, "beta2": 0.5, "epsilon": 1e-6, "export": Export(dtype="bf16")},
    ],
)
def test_facts_that_no_price_reads_are_not_asked_about(llama_profile: Profile, change: dict[str, Any]) -> None:
    other = replace(WORK, **change)
    assert priced_part(other) == priced_part(WORK)
    machine = table_machine("T4")
    prices = [
        training_problem(llama_profile, workload=workload, goal=GOAL, machine=machine).price(PLAIN).to_json()
        for workload in (WORK, other)
    ]
    assert prices[0] == prices[1]


def test_an_answer_for_a_longer_run_takes_longer_and_is_else_the_same(llama_profile: Profile) -> None:
    answer = ask(llama_profile, workload=replace(WORK, num_steps=500))
    longer = answer.for_run(replace(WORK, num_steps=1000))
    assert longer.to_json() == ask(llama_profile, workload=replace(WORK, num_steps=1000)).to_json()


@pytest.mark.parametrize("change", [{"num_steps": 200}, {"checkpoint_every_steps": 5}, {"export": Export(gguf="f16")}])
def test_the_stages_of_another_run_are_worked_out_anew(llama_profile: Profile, change: dict[str, Any]) -> None:
    memory = PriceMemory()
    ask(llama_profile, memory=memory)
    workload = replace(WORK, **change)
    remembered = ask(llama_profile, workload=workload, memory=memory).to_json()
    assert remembered == ask(llama_profile, workload=workload).to_json()
    assert detailed_part(workload) != detailed_part(WORK)
