"""Compiled blocks are tried only where a run is long enough to repay compiling, and taken only where they are faster."""

from dataclasses import replace

import pytest

from optimizer.api.plan import plan_profiled
from optimizer.api.try_compiled import may_compile, try_compiled
from optimizer.base.errors import BlockNotCompiled
from optimizer.goal import Goal
from optimizer.hardware.machine import COMPILER_FACT, NO_COMPILER_FACT, Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import KernelsPlan
from optimizer.plan.pins.training import Pins, read_pins
from optimizer.profile.extent import Extent
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer
from optimizer.workload import TrainingWorkload
from tests.optimizer.profiles import trace
from tests.optimizer.techniques.plans import LLAMA
from tests.optimizer.techniques.test_pairs import machine as machine

GOAL = Goal(device_budget_bytes=2**30, allow_lossy=True, forbid=("bf16", "fp16", "autocast", "no_master_weights"))
WORKLOAD = TrainingWorkload(sequence_length=24, global_batch_size=4, num_steps=1)
COMPILE_S = 20.0


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trace(read_model_spec(LLAMA), extent=Extent(representations=("fp32",), shapes=((1, 24), (2, 24), (4, 24))))


@pytest.fixture(scope="module")
def answer(profile: Profile, machine: Machine) -> ObjectiveAnswer:
    return plan_profiled(profile, machine=machine, workload=WORKLOAD, goal=GOAL)


def lasting(answer: ObjectiveAnswer, total_s: float) -> ObjectiveAnswer:
    """The answer with a run of about so many seconds."""
    num_steps = round(total_s * 1000 / answer.result.chosen.prediction.step_ms)
    return answer.for_run(replace(WORKLOAD, num_steps=num_steps))


def last_sentence(answer: ObjectiveAnswer) -> str:
    return answer.result.explanation[-1]


def test_a_short_run_declines_without_tracing(answer: ObjectiveAnswer, profile: Profile, machine: Machine) -> None:
    def refuse(goal: Goal) -> ObjectiveAnswer:
        raise AssertionError("nothing is to be searched")

    found = try_compiled(lasting(answer, 2 * COMPILE_S - 1), refuse, profile=profile, goal=GOAL, machine=machine)
    assert found.result.chosen.plan.kernels == KernelsPlan()
    assert last_sentence(found) == "blocks are not compiled: that takes about 20 s, and a run of 39 s would not repay it"


@pytest.mark.parametrize(("compiled_s", "is_taken"), [(900.0, True), (999.0, False)])
def test_a_long_run_takes_what_is_faster(
    answer: ObjectiveAnswer, profile: Profile, machine: Machine, compiled_s: float, *, is_taken: bool
) -> None:
    asked: list[Pins] = []

    def answer_with(goal: Goal) -> ObjectiveAnswer:
        asked.append(goal.pins)
        return lasting(answer, compiled_s)

    found = try_compiled(lasting(answer, 1000.0), answer_with, profile=profile, goal=GOAL, machine=machine)
    assert asked == [
        read_pins(["kernels.blocks=compiled", "weights.dtype=fp32", "weights.autocast=off", "weights.frozen=same"])
    ]
    assert round(found.result.chosen.prediction.total_s) == (900 if is_taken else 1000)
    assert last_sentence(found) == (
        "op by op the run would take 1000 s instead of 900 s with compiling"
        if is_taken
        else "blocks are not compiled: with compiling the run would take 999 s instead of 1000 s"
    )


def test_a_block_that_cannot_be_compiled_leaves_the_answer_and_a_sentence(
    answer: ObjectiveAnswer, profile: Profile, machine: Machine
) -> None:
    def answer_with(goal: Goal) -> ObjectiveAnswer:
        raise BlockNotCompiled("SomeBlock", "it decides by its numbers")

    found = try_compiled(lasting(answer, 1000.0), answer_with, profile=profile, goal=GOAL, machine=machine)
    assert found.result.chosen == lasting(answer, 1000.0).result.chosen
    assert last_sentence(found).endswith("SomeBlock cannot be compiled: it decides by its numbers")


@pytest.mark.parametrize(
    "goal",
    [
        replace(GOAL, allow_lossy=False),
        replace(GOAL, forbid=("compile_blocks",)),
        replace(GOAL, objective="largest_batch"),
        replace(GOAL, pins=read_pins(["kernels.blocks=memory_saving"])),
    ],
)
def test_it_is_not_tried_where_the_goal_leaves_no_choice(goal: Goal) -> None:
    assert may_compile(GOAL)
    assert not may_compile(goal)


def test_a_pin_or_a_machine_that_cannot_is_named_without_tracing(
    answer: ObjectiveAnswer, profile: Profile, machine: Machine
) -> None:
    def refuse(goal: Goal) -> ObjectiveAnswer:
        raise AssertionError("nothing is to be searched")

    long = lasting(answer, 1000.0)
    bare = replace(machine, facts={**machine.facts, NO_COMPILER_FACT: "no C++ compiler (g++)"})
    found = try_compiled(long, refuse, profile=profile, goal=GOAL, machine=bare)
    assert last_sentence(found) == f"blocks are not compiled: {machine.name} has no C++ compiler (g++)"
    assert found.result.chosen == long.result.chosen
    selective = replace(GOAL, pins=read_pins(["activations.per_block=selective"]))
    found = try_compiled(long, refuse, profile=profile, goal=selective, machine=machine)
    assert last_sentence(found).startswith("blocks are not compiled: activations.per_block is selective, which keeps some of")
    chosen = long.result.chosen
    packed = replace(chosen, plan=replace(chosen.plan, weights=replace(chosen.plan.weights, frozen="nf4")))
    of_packed = replace(long, result=replace(long.result, chosen=packed))
    found = try_compiled(of_packed, refuse, profile=profile, goal=GOAL, machine=machine)
    assert last_sentence(found) == (
        "blocks are not compiled: weights.frozen is nf4, which a library unpacks, out of the compiler's sight"
    )


def test_a_machine_is_known_to_compile_where_its_probe_says_so_or_it_is_a_card_of_the_table(machine: Machine) -> None:
    measured = replace(machine, rates=replace(machine.rates, source="measured"), facts={})
    assert not measured.is_known_to_compile
    assert replace(measured, facts={COMPILER_FACT: "g++"}).is_known_to_compile
    table = replace(measured, rates=replace(machine.rates, source="table"))
    assert table.is_known_to_compile
    assert not replace(table, facts={NO_COMPILER_FACT: "no C++ compiler (g++)"}).is_known_to_compile
