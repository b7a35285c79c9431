"""Single decisions that are made beforehand: a plan's table with most of its cells empty. A search fills the rest.

A pin without effect in a plan is kept by that plan: how far ahead weights are fetched if all of them are resident, how much of
the state is off the device if none is, how offloaded activations travel if nothing is offloaded.
"""

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.serialize import from_json, to_json
from optimizer.plan.activations import OFFLOADING, BlockChoice, Compression
from optimizer.plan.gradients import GradientsChoice
from optimizer.plan.optimizer_state import StatePlace
from optimizer.plan.pins.table import PinTable, kinds_of_pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.plan.weights import Autocast, FrozenFormat, WeightsDtype, WeightsPlace

_EVERY_BLOCK = "per_block"


@dataclass(frozen=True, kw_only=True)
class BatchPins:
    """Pinned fields of ``BatchPlan``."""

    micro_batch_size: int | None = None
    accumulation_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class WeightsPins:
    """Pinned fields of ``WeightsPlan``."""

    dtype: WeightsDtype | None = None
    autocast: Autocast | None = None
    place: WeightsPlace | None = None
    prefetch: int | None = None
    frozen: FrozenFormat | None = None


@dataclass(frozen=True, kw_only=True)
class GradientsPins:
    """Pinned fields of ``GradientsPlan``."""

    choice: GradientsChoice | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerStatePins:
    """Pinned fields of ``OptimizerStatePlan``."""

    bits: Literal[32, 8] | None = None
    place: StatePlace | None = None
    fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class ActivationsPins:
    """Pinned fields of ``ActivationsPlan``."""

    per_block: tuple[BlockChoice, ...] | None = None
    """A single choice applies to every block, however many there are; several choices name each block in turn."""
    compress: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class LogitsAndLossPins:
    """Pinned fields of ``LogitsAndLossPlan``."""

    num_chunks: int | None = None


@dataclass(frozen=True, kw_only=True)
class AllocatorPins:
    """Pinned fields of ``AllocatorPlan``."""

    expandable_segments: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Pins(PinTable):
    """The plan's categories and their decisions; None leaves one free."""

    batch: BatchPins = field(default_factory=BatchPins)
    weights: WeightsPins = field(default_factory=WeightsPins)
    gradients: GradientsPins = field(default_factory=GradientsPins)
    optimizer_state: OptimizerStatePins = field(default_factory=OptimizerStatePins)
    activations: ActivationsPins = field(default_factory=ActivationsPins)
    logits_and_loss: LogitsAndLossPins = field(default_factory=LogitsAndLossPins)
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
            if _is_idle(path, plan):
                continue
            found = getattr(getattr(plan, category), knob)
            if found != (self.blocks(len(found)) if knob == _EVERY_BLOCK else value):
                return path
        return None

    def blocks(self, num_blocks: int) -> tuple[BlockChoice, ...] | None:
        """The pinned choice of each block, in a model of this depth; None if blocks are free."""
        choices = self.activations.per_block
        return choices * num_blocks if choices is not None and len(choices) == 1 else choices

    def techniques(self) -> "Iterator[tuple[str, Technique]]":
        pinned = dict(self.values())
        asked: tuple[tuple[str, bool, Technique], ...] = (
            ("batch.accumulation_steps", pinned.get("batch.accumulation_steps", 1) > 1, "accumulate"),
            ("weights.dtype", pinned.get("weights.dtype") == "bf16", "bf16"),
            ("weights.dtype", pinned.get("weights.dtype") == "fp16", "fp16"),
            ("weights.autocast", pinned.get("weights.autocast", "off") != "off", "autocast"),
            ("weights.place", pinned.get("weights.place", "device") != "device", "stream_weights"),
            ("weights.place", pinned.get("weights.place") == "disk", "disk"),
            ("weights.frozen", pinned.get("weights.frozen", "same") != "same", "quantize_frozen"),
            ("gradients.choice", pinned.get("gradients.choice") == "consume", "consume_gradients"),
            ("gradients.choice", pinned.get("gradients.choice") == "host", "offload_gradients"),
            ("optimizer_state.bits", pinned.get("optimizer_state.bits") == 8, "8bit_optimizer"),
            ("optimizer_state.place", pinned.get("optimizer_state.place", "device") != "device", "offload_optimizer"),
            ("optimizer_state.place", pinned.get("optimizer_state.place") == "disk", "disk"),
            ("logits_and_loss.num_chunks", pinned.get("logits_and_loss.num_chunks", 1) > 1, "chunked_loss"),
            *_of_blocks(self.activations),
        )
        yield from ((path, technique) for path, is_asked, technique in asked if is_asked)


def _of_blocks(activations: ActivationsPins) -> "Iterator[tuple[str, bool, Technique]]":
    choices = set(activations.per_block or ())
    path = f"activations.{_EVERY_BLOCK}"
    offloads = bool(choices & set(OFFLOADING))
    yield path, bool(choices & {"recompute", "selective"}), "recompute"
    yield path, offloads, "offload"
    yield path, "offload_disk" in choices, "disk"
    yield path, "offload_remote" in choices, "remote"
    yield "activations.compress", offloads and (activations.compress or "none") != "none", "compress"


def _is_idle(path: str, plan: "Plan") -> bool:
    """Return true if the pinned decision has no effect in this plan."""
    return {
        "weights.prefetch": plan.weights.place == "device",
        "optimizer_state.fraction": plan.optimizer_state.place == "device",
        "activations.compress": plan.activations.num_offloaded == 0,
    }.get(path, False)


def read_pins(texts: typing.Iterable[str]) -> Pins:
    """Read pins from texts such as ``optimizer_state.bits=8``. Raises InvalidWorkload that names the knobs, or the values of one.

    Blocks: ``activations.per_block=recompute`` for all, or ``recompute*23,keep*9`` from the first to the last.
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
        document.setdefault(category, {})[knob] = _read_value(written.strip(), kind, is_list=knob == _EVERY_BLOCK)
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
        return [choice for part in written.split(",") for choice in _repeated(part.strip())]
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
