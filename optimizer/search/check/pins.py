"""Checks whether any plan can keep what a goal pins, and if none can, why. Asked once, before a search."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import COMPILED
from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.pins.training import Pins
from optimizer.plan.weights import WeightsPlace
from optimizer.search.arrangements import keep_everything
from optimizer.search.check.pin_errors import check_pinned_techniques, no_plan_keeps, refuse_pin
from optimizer.search.problem import OuterPlan, SearchProblem, divisors

_FIELDS = {
    "batch.micro_batch_size": "micro_batch_size",
    "batch.accumulation_steps": "accumulation_steps",
    "weights.dtype": "dtype",
    "weights.autocast": "autocast",
    "weights.frozen": "frozen",
    "weights.place": "weights_place",
    "gradients.choice": "gradients",
    "optimizer_state.bits": "bits",
    "optimizer_state.place": "state_place",
}
"""Fields of ``OuterPlan``, beside ``SearchProblem.pinned_levers``."""


def check_pins(problem: SearchProblem) -> None:
    """Raise InvalidPlan where no plan of this model and this workload on this machine keeps every pin."""
    pins = problem.goal.pins
    if pins.is_empty:
        return
    _check_batch(pins, total=problem.workload.global_batch_size)
    blocks = problem.pinned_blocks
    if blocks is not None and len(blocks) != problem.num_blocks:
        raise refuse_pin(
            "activations.per_block",
            f"{len(blocks)} choices",
            f"the model has {problem.num_blocks} blocks: name one choice for all, or one for each",
        )
    if pins.kernels.blocks == "compiled" and not _has_compiled(problem):
        raise refuse_pin(
            "kernels.blocks",
            "compiled",
            "this profile holds none: they are traced where the goal of the question pins them",
        )
    if pins.kernels.blocks == "compiled" and "compile_blocks" in problem.unavailable:
        raise refuse_pin(
            "kernels.blocks",
            "compiled",
            "this machine cannot compile them: that needs a C++ compiler (g++) with Python's headers, on a card Triton too; "
            "install it and start the worker again, or leave the pin out",
        )
    check_pinned_techniques(problem)
    if any(problem.permits_setting(home) for base in problem.settings() for home in _homes(base)):
        return
    raise _contradiction(problem)


def _has_compiled(problem: SearchProblem) -> bool:
    known = problem.representations
    return known is None or any(name.endswith(COMPILED) for name in known)


def _check_batch(pins: Pins, *, total: int) -> None:
    for path, size in (
        ("batch.micro_batch_size", pins.batch.micro_batch_size),
        ("batch.accumulation_steps", pins.batch.accumulation_steps),
    ):
        if size is not None and size not in divisors(total):
            listed = ", ".join(map(str, divisors(total)))
            raise refuse_pin(path, size, f"the batch of {total} is cut evenly: allowed are {listed}")


def _homes(base: OuterPlan) -> list[OuterPlan]:
    return [
        replace(base, gradients=gradients, state_place=state, weights_place=weights)
        for gradients, state, weights in product(get_args(GradientsChoice), get_args(StatePlace), get_args(WeightsPlace))
    ]


def _contradiction(problem: SearchProblem) -> InvalidPlan:
    """Faults of plain training with the pins put into it."""
    total, pinned = problem.workload.global_batch_size, dict(problem.goal.pins.values())
    plain = OuterPlan(micro_batch_size=total, accumulation_steps=1, layout=problem.layout, **problem.pinned_levers)
    fields: dict[str, Any] = {name: pinned[path] for path, name in _FIELDS.items() if path in pinned}
    if "micro_batch_size" in fields:
        fields.setdefault("accumulation_steps", total // fields["micro_batch_size"])
    elif "accumulation_steps" in fields:
        fields["micro_batch_size"] = total // fields["accumulation_steps"]
    try:
        plan = replace(plain, **fields).plan(problem.pinned_blocks or keep_everything(problem.num_blocks))
        problem.check(plan)
    except InvalidPlan as error:
        return no_plan_keeps(problem.goal.pins, error.message)
    return no_plan_keeps(problem.goal.pins)
