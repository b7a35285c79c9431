"""Finds in which representations of weights a question needs compiled blocks traced, and refuses what cannot be. Torch-free."""

from itertools import product
from typing import Final

from optimizer.base.errors import InvalidPlan
from optimizer.goal import Goal
from optimizer.plan.activations import NOT_COMPILED
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.extent import traced_representation
from optimizer.workload import TrainingWorkload

_FORMS: Final[tuple[FrozenFormat, ...]] = ("same", "int8", "int4")
"""Formats of frozen weights that the compiler can look into."""
SECONDS_TO_TRACE: Final = 15
"""Processor time to trace compiled blocks in one representation, of the middle of what was measured (docs/experiments.md)."""
REFUSED_TYPES: Final = {
    "gemma2": "its capped attention makes a view that cannot be captured without numbers",
    "falcon": "the code generated for its blocks replaces a tensor's memory, which cannot be followed",
}
"""Model types whose blocks are known not to compile, and why; nobody need wait for a trace to learn it."""
_PIN: Final = "goal.pins.kernels.blocks"
_ALLOWED: Final = {
    "activations.per_block": "keep, recompute and offload",
    "weights.frozen": "same, int8 and int4",
    "layout": "one device",
}


def compiled_representations(workload: TrainingWorkload, goal: Goal) -> tuple[str, ...]:
    """The representations that a goal which pins compiled blocks leaves open; none where it does not pin them.

    Each takes seconds to trace, so what the goal rules out is left out. fp16 is traced as bf16.
    """
    if goal.pins.kernels.blocks != "compiled":
        return ()
    pins = goal.pins.weights
    may_pack = workload.adapter is not None and _may(goal, "quantize_frozen")
    pairs = product(
        ("fp32", *(("bf16",) if _may(goal, "bf16") or _may(goal, "fp16") else ())) if pins.dtype is None else (pins.dtype,),
        ("off", *(("bf16",) if _may(goal, "autocast") else ())) if pins.autocast is None else (pins.autocast,),
        (_FORMS if may_pack else _FORMS[:1]) if pins.frozen is None else (pins.frozen,),
    )
    possible = [
        WeightsPlan(dtype=dtype, autocast=autocast, frozen=form)
        for dtype, autocast, form in pairs
        if autocast == "off" or dtype == "fp32"
    ]
    # pins that contradict each other leave none: the search says so, of a profile that holds some
    return tuple(dict.fromkeys(traced_representation(weights.representation) for weights in possible)) or ("fp32",)


def compiled_representation_of(plan: Plan) -> tuple[str, ...]:
    """The representation of a plan that compiles blocks; none for another plan."""
    return (traced_representation(plan.weights.representation),) if plan.kernels.blocks == "compiled" else ()


def _may(goal: Goal, technique: Technique) -> bool:
    return technique not in goal.forbid and goal.allows_loss_by(technique)


def check_compiled_pin(goal: Goal, *, model_type: str) -> None:
    """Raise InvalidPlan where compiled blocks are pinned for a model, or beside another pin, that is known to refuse them.

    What is not known here is found by the trace (BlockNotCompiled).
    """
    pins = goal.pins
    if pins.kernels.blocks != "compiled":
        return
    _check_type(model_type, field=_PIN)
    selective = next((choice for choice in NOT_COMPILED if choice in (pins.activations.per_block or ())), None)
    beside = (
        (selective, "activations.per_block", "keeps some of a block's results, and a compiled block is one op"),
        ("nf4" if pins.weights.frozen == "nf4" else None, "weights.frozen", "a library unpacks, out of the compiler's sight"),
        (_devices_pinned(goal), "layout", "several devices do not carry out"),
    )
    for value, path, why in beside:
        if value is not None:
            raise InvalidPlan(
                f"{_PIN} is compiled, and goal.pins.{path} is {value}, which {why}",
                field=_PIN,
                value="compiled",
                allowed=["memory_saving"],
                hint=f"Leave out one of the two pins; compiled blocks go with {_ALLOWED[path]}.",
            )


def _check_type(model_type: str, *, field: str) -> None:
    """Raise InvalidPlan for a model type whose blocks cannot be compiled. field: where that was asked for."""
    why = REFUSED_TYPES.get(model_type)
    if why is not None:
        raise InvalidPlan(
            f"{field} is compiled; blocks of type {model_type} cannot be compiled: {why}",
            field=field,
            value="compiled",
            allowed=["memory_saving"],
            hint="Run blocks op by op: kernels.blocks=memory_saving, or leave the pin out.",
        )


def _devices_pinned(goal: Goal) -> str | None:
    layout = goal.pins.layout
    if (layout.num_devices or 1) > 1:
        return f"num_devices={layout.num_devices}"
    return None if layout.data in (None, "replicated") else f"data={layout.data}"
