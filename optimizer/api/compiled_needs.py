"""Finds in which representations of weights a question needs compiled blocks traced, and refuses what cannot be. Torch-free."""

from collections.abc import Callable
from itertools import product
from typing import Final, NamedTuple

from optimizer.base.errors import InvalidPlan
from optimizer.plan.activations import NOT_COMPILED
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.plan.weights import FrozenFormat, WeightsPlan
from optimizer.profile.extent import traced_representation
from optimizer.workload import TrainingWorkload

_FORMS: Final[tuple[FrozenFormat, ...]] = ("same", "int8", "int4")
"""Formats of frozen weights that the compiler can look into."""
SECONDS_TO_TRACE: Final = 15
"""Processor time to trace compiled blocks in one representation, of the middle of what was measured (docs/experiments.md)."""
_PIN: Final = "goal.pins.kernels.blocks"
_ALLOWED: Final = {
    "activations.per_block": "keep, recompute and offload",
    "weights.frozen": "same, int8 and int4",
    "layout": "one device",
}


def compiled_representations(
    workload: TrainingWorkload, pinned: Pins, may_use: Callable[[Technique], bool], *, ran: Plan | None = None
) -> tuple[str, ...]:
    """The representations that a goal which pins compiled blocks leaves open; else that of a plan that ran with them, else none.

    Each takes seconds to trace, so what the goal rules out is left out. fp16 is traced as bf16. may_use: the goal's.
    """
    if pinned.kernels.blocks != "compiled":
        return _representation_of(ran) if ran is not None and ran.kernels.blocks == "compiled" else ()
    pins = pinned.weights
    may_pack = workload.adapter is not None and may_use("quantize_frozen")
    pairs = product(
        ("fp32", *(("bf16",) if may_use("bf16") or may_use("fp16") else ())) if pins.dtype is None else (pins.dtype,),
        ("off", *(("bf16",) if may_use("autocast") else ())) if pins.autocast is None else (pins.autocast,),
        (_FORMS if may_pack else _FORMS[:1]) if pins.frozen is None else (pins.frozen,),
    )
    possible = [
        WeightsPlan(dtype=dtype, autocast=autocast, frozen=form)
        for dtype, autocast, form in pairs
        if autocast == "off" or dtype == "fp32"
    ]
    # pins that contradict each other leave none: the search says so, of a profile that holds some
    return tuple(dict.fromkeys(traced_representation(weights.representation) for weights in possible)) or ("fp32",)


def _representation_of(plan: Plan) -> tuple[str, ...]:
    return (traced_representation(plan.weights.representation),)


def check_compiled_pin(pins: Pins) -> None:
    """Raise InvalidPlan where compiled blocks are pinned beside another pin that is known to refuse them.

    What is not known here is found by the trace (BlockNotCompiled).
    """
    if pins.kernels.blocks != "compiled":
        return
    conflict = find_compiled_conflict(pins)
    if conflict is not None:
        raise _refused(
            f"{_PIN} is compiled, and goal.pins.{conflict.path} is {conflict.value}, which {conflict.why}",
            hint=f"Leave out one of the two pins; compiled blocks go with {_ALLOWED[conflict.path]}.",
        )


class CompiledConflict(NamedTuple):
    """A pin that does not go with compiled blocks."""

    path: str
    value: str
    why: str
    """The rest of a sentence that begins with the two others."""


def find_compiled_conflict(pins: Pins) -> CompiledConflict | None:
    """The first of the other pins that does not go with compiled blocks."""
    selective = next((choice for choice in NOT_COMPILED if choice in (pins.activations.per_block or ())), None)
    beside = (
        ("activations.per_block", selective, "keeps some of a block's results, and a compiled block is one op"),
        ("weights.frozen", "nf4" if pins.weights.frozen == "nf4" else None, "a library unpacks, out of the compiler's sight"),
        ("layout", _devices_pinned(pins), "several devices do not carry out"),
    )
    return next((CompiledConflict(path, value, why) for path, value, why in beside if value is not None), None)


def _refused(message: str, *, hint: str) -> InvalidPlan:
    return InvalidPlan(message, field=_PIN, value="compiled", allowed=["memory_saving"], hint=hint)


def _devices_pinned(pins: Pins) -> str | None:
    layout = pins.layout
    if layout.stage_blocks:
        return f"stage_blocks={', '.join(map(str, layout.stage_blocks))}"
    if (layout.tensor or 1) > 1:
        return f"tensor={layout.tensor}"
    if (layout.num_devices or 1) > 1:
        return f"num_devices={layout.num_devices}"
    return None if layout.data in (None, "replicated") else f"data={layout.data}"
