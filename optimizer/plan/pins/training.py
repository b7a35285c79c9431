"""Single decisions that are made beforehand: a plan's table with most of its cells empty. A search fills the rest.

A pin without effect in a plan is kept by that plan: how far ahead weights are fetched if all of them are resident, how much of
the state is off the device if none is, how offloaded activations travel if nothing is offloaded.
"""

import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.plan.activations import ActivationsPins, BlockChoice, KernelsPins
from optimizer.plan.allocator import AllocatorPins
from optimizer.plan.batch import BatchPins
from optimizer.plan.devices.layout import LayoutPins
from optimizer.plan.gradients import GradientsPins
from optimizer.plan.logits_and_loss import LogitsAndLossPins
from optimizer.plan.optimizer_state import OptimizerStatePins
from optimizer.plan.pins.table import PinTable, kinds_of_pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import is_idle
from optimizer.plan.weights import WeightsPins

_EVERY_BLOCK = "per_block"
_STAGES = "stage_blocks"
_LISTS = (_EVERY_BLOCK, _STAGES)


@dataclass(frozen=True, kw_only=True)
class Pins(PinTable):
    """The plan's categories and their decisions; None leaves one free."""

    layout: LayoutPins = field(default_factory=LayoutPins)
    batch: BatchPins = field(default_factory=BatchPins)
    weights: WeightsPins = field(default_factory=WeightsPins)
    gradients: GradientsPins = field(default_factory=GradientsPins)
    optimizer_state: OptimizerStatePins = field(default_factory=OptimizerStatePins)
    activations: ActivationsPins = field(default_factory=ActivationsPins)
    logits_and_loss: LogitsAndLossPins = field(default_factory=LogitsAndLossPins)
    kernels: KernelsPins = field(default_factory=KernelsPins)
    allocator: AllocatorPins = field(default_factory=AllocatorPins)

    def __post_init__(self) -> None:
        if self.activations.per_block is not None and not self.activations.per_block:
            raise InvalidWorkload(
                "goal.pins.activations.per_block is empty; allowed: one choice for every block, or one for each",
                field="goal.pins.activations.per_block",
                value=[],
                allowed="one choice, or one for each block",
            )

    def broken_by(self, plan: "Plan") -> str | None:
        """The first pin that the plan breaks (``optimizer_state.bits``); None if it keeps all."""
        for path, value in self.values():
            category, _, knob = path.partition(".")
            if is_idle(path, plan):
                continue
            found = getattr(getattr(plan, category), knob)
            if found != (self.blocks(len(found)) if knob == _EVERY_BLOCK else value):
                return path
        return None

    def blocks(self, num_blocks: int) -> tuple[BlockChoice, ...] | None:
        """The pinned choice of each block, in a model of this depth; None if blocks are free."""
        choices = self.activations.per_block
        return choices * num_blocks if choices is not None and len(choices) == 1 else choices


def read_pins(texts: typing.Iterable[str]) -> Pins:
    """Read pins from texts such as ``optimizer_state.bits=8``. Raises InvalidWorkload that names the knobs, or the values of one.

    Blocks: ``activations.per_block=recompute`` for all, or ``recompute*23,keep*9`` from the first to the last. Those of each
    device of a model that is cut: ``layout.stage_blocks=13,11``.
    """
    document: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, is_given, written = text.partition("=")
        kind = knob_kinds().get(path.strip())
        if kind is None or not is_given:
            allowed = list(knob_kinds())
            raise InvalidWorkload(
                f"pin {text[:80]!r} is not understood; allowed: KNOB=VALUE with one of {', '.join(allowed)}",
                field="goal.pins",
                value=text[:80],
                allowed=allowed,
            )
        category, _, knob = path.strip().partition(".")
        document.setdefault(category, {})[knob] = _read_value(written.strip(), kind, is_list=knob in _LISTS)
    return from_json(Pins, document, path="goal.pins", error=InvalidWorkload)


def pins_of_change(before: "Plan", after: "Plan") -> dict[str, Any]:
    """Pins, as JSON, that turn one plan into the other: the knobs on which they differ.

    The batch pins only the size of a micro-batch, since their number follows.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in knob_kinds():
        category, _, knob = path.partition(".")
        value = getattr(getattr(after, category), knob)
        if value == getattr(getattr(before, category), knob) or knob == "accumulation_steps":
            continue
        alike = knob == _EVERY_BLOCK and len(set(value)) == 1
        found.setdefault(category, {})[knob] = to_json(value[:1] if alike else value)
    return found


def list_knobs_to_pin() -> tuple[str, ...]:
    """Paths of all knobs (``optimizer_state.bits``), in the order of the plan."""
    return tuple(knob_kinds())


def knob_kinds() -> dict[str, Any]:
    """Types of the knobs' values, by path."""
    return kinds_of_pins(Pins)


def _read_value(written: str, kind: Any, *, is_list: bool) -> Any:
    """Convert a written value to its JSON form; a text that is no number stays a text, and is refused by name later."""
    if is_list:
        parts = [choice for part in written.split(",") for choice in _repeated(part.strip())]
        return [int(part) if part.isdigit() else part for part in parts]
    allowed = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if kind is bool:
        return {"true": True, "false": False}.get(written.lower(), written)
    if kind in (int, float) or (all(isinstance(value, int) for value in allowed) and allowed):
        try:
            return float(written) if kind is float else int(written)
        except ValueError:
            return written
    return written


def _repeated(part: str) -> list[str]:
    choice, is_given, times = part.partition("*")
    if not is_given or not times.strip().isdigit() or int(times) > 10_000:
        return [part]
    return [choice.strip()] * int(times)
