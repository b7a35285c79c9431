"""Decides whether blocks should run compiled, once the best plan without is known: a short run cannot repay compiling.

Tracing compiled blocks takes a minute, so they are not traced for every question. The representation is that of the plan
without; blocks, batch and homes are searched afresh. The service, whose answers must not wait for a trace, gives advice instead.
Torch-free.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from optimizer.api.compiled_needs import REFUSED_TYPES
from optimizer.base.errors import HeadroomError
from optimizer.base.units import format_duration
from optimizer.estimate.compiling import estimate_compile_s
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.plan.activations import KernelsPins, KernelsPlan
from optimizer.plan.pins.training import Pins
from optimizer.profile.profile import Profile
from optimizer.search.budgeted import list_unavailable
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
    """The better of the answer and of the one with compiled blocks, with a sentence on what decided."""
    if not may_compile(goal):
        return answer
    found = answer.result.chosen.prediction
    compile_s = _compile_s(answer, profile=profile, machine=machine)
    if found.total_s * _MOST_SAVED <= compile_s:
        return _explained(
            answer,
            f"blocks are not compiled: that takes about {compile_s:.0f} s, and a run of {found.total_s:.0f} s would not repay it",
        )
    try:
        other = answer_with(replace(goal, pins=_pinned(goal.pins, answer)))
    except HeadroomError as error:
        return _explained(answer, f"blocks are not compiled: {error.message}")
    total_s = other.result.chosen.prediction.total_s
    if total_s > found.total_s * _WORTH:
        return _explained(
            answer, f"blocks are not compiled: with compiling the run would take {total_s:.0f} s instead of {found.total_s:.0f} s"
        )
    return _explained(other, f"op by op the run would take {found.total_s:.0f} s instead of {total_s:.0f} s with compiling")


def advise_compiled(answer: ObjectiveAnswer, *, profile: Profile, goal: Goal, machine: Machine) -> str:
    """A sentence for whoever has not traced compiled blocks; empty where they cannot be had or would not repay compiling."""
    is_possible = "compile_blocks" not in list_unavailable(machine) and profile.model_type not in REFUSED_TYPES
    if not (is_possible and may_compile(goal)):
        return ""
    found = answer.result.chosen.prediction
    compile_s = _compile_s(answer, profile=profile, machine=machine)
    if found.total_s * _MOST_SAVED <= compile_s:
        return ""
    return (
        f"blocks run op by op; compiling them takes about {format_duration(compile_s)} once and may shorten this run of "
        f"{format_duration(found.total_s)}: pin kernels.blocks=compiled, and it is traced and priced"
    )


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
