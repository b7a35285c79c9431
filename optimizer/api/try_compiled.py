"""Decides whether blocks should run compiled, once the best plan without is known: a short run cannot repay compiling.

Tracing compiled blocks takes a minute, so they are not traced for every question. The representation is that of the plan
without; blocks, batch and homes are searched afresh. Torch-free.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from optimizer.api.compiled_needs import find_compiled_conflict
from optimizer.base.errors import HeadroomError
from optimizer.estimate.compiling import estimate_compile_s
from optimizer.goal import Goal
from optimizer.hardware.machine import NO_COMPILER_FACT, Machine
from optimizer.plan.activations import KernelsPins, KernelsPlan
from optimizer.plan.pins.training import Pins
from optimizer.profile.profile import Profile
from optimizer.search.questions.answers import ObjectiveAnswer

AnswerWith = Callable[[Goal], ObjectiveAnswer]
"""Answers the question for another goal."""
_MOST_SAVED: Final = 0.5
"""Largest share of a run's time that compiled blocks are taken to save before they are priced."""
_WORTH: Final = 0.97
"""Share of the time without at which compiled blocks are worth it: rates of fused kernels are not measured."""


def try_compiled(
    answer: ObjectiveAnswer, answer_with: AnswerWith, *, profile: Profile, goal: Goal, machine: Machine
) -> ObjectiveAnswer:
    """The better of the answer and of the one with compiled blocks, with a sentence on what decided.

    answer_with: called where the run is long enough, and the model's type and the machine allow it; what it raises of a
    HeadroomError is the reason why blocks are not compiled.
    """
    if machine.others or not may_compile(goal):
        return answer
    found = answer.result.chosen.prediction
    compile_s = _compile_s(answer, profile=profile, machine=machine)
    if found.total_s * _MOST_SAVED <= compile_s:
        return _explained(
            answer,
            f"blocks are not compiled: that takes about {compile_s:.0f} s, and a run of {found.total_s:.0f} s would not repay it",
        )
    pins = _pinned(goal.pins, answer)
    if refusal := why_not_compiled(machine, pins=pins):
        return _explained(answer, f"blocks are not compiled: {refusal}")
    try:
        other = answer_with(replace(goal, pins=pins))
    except HeadroomError as error:
        return _explained(answer, f"blocks are not compiled: {error.message}")
    total_s = other.result.chosen.prediction.total_s
    if total_s > found.total_s * _WORTH:
        return _explained(
            answer, f"blocks are not compiled: with compiling the run would take {total_s:.0f} s instead of {found.total_s:.0f} s"
        )
    return _explained(other, f"op by op the run would take {found.total_s:.0f} s instead of {total_s:.0f} s with compiling")


def why_not_compiled(machine: Machine, *, pins: Pins) -> str:
    """The reason why a machine or decisions beside it are known to have no compiled blocks; empty where none is known."""
    if (conflict := find_compiled_conflict(pins)) is not None:
        return f"{conflict.path} is {conflict.value}, which {conflict.why}"
    return f"{machine.name} has {machine.facts[NO_COMPILER_FACT]}" if NO_COMPILER_FACT in machine.facts else ""


def may_compile(goal: Goal) -> bool:
    """Report whether a goal leaves it open how blocks run."""
    is_allowed = "compile_blocks" not in goal.forbid and goal.allows_loss_by("compile_blocks")
    return is_allowed and goal.objective == "fastest_step" and goal.num_devices == 1 and goal.pins.kernels.blocks is None


def _compile_s(answer: ObjectiveAnswer, *, profile: Profile, machine: Machine) -> float:
    """Seconds to compile the blocks of the plan that was found without."""
    compiled_plan = replace(answer.result.chosen.plan, kernels=KernelsPlan(blocks="compiled"))
    return estimate_compile_s(profile, compiled_plan, device_kind=machine.device.kind)


def _pinned(pins: Pins, answer: ObjectiveAnswer) -> Pins:
    weights = answer.result.chosen.plan.weights
    held = replace(pins.weights, dtype=weights.dtype, autocast=weights.autocast, frozen=weights.frozen)
    return replace(pins, kernels=KernelsPins(blocks="compiled"), weights=held)


def _explained(answer: ObjectiveAnswer, sentence: str) -> ObjectiveAnswer:
    result = answer.result
    return replace(answer, result=replace(result, explanation=(*result.explanation, sentence)))
