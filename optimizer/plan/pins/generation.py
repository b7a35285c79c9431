"""Decisions of a generation's plan that are made beforehand, as ``pins.py`` has them of training; a search finds the rest."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar

from optimizer.base.errors import InvalidPlan, InvalidWorkload
from optimizer.plan.allocator import AllocatorPins
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import AttentionPlace, KvDtype, KvPlace
from optimizer.plan.pins.table import PinTable
from optimizer.plan.techniques import is_idle
from optimizer.plan.weights import FrozenFormat, WeightsDtype, WeightsPlace

V = TypeVar("V")
NO_LIMIT: Final = "all"
"""The text for None, if a decision may be None."""


@dataclass(frozen=True, kw_only=True)
class GenerationWeightsPins:
    """Pinned fields of ``WeightsPlan`` that apply to a generation."""

    dtype: WeightsDtype | None = None
    place: WeightsPlace | None = None
    prefetch: int | None = None
    frozen: FrozenFormat | None = None


@dataclass(frozen=True, kw_only=True)
class KvCachePins:
    """Pinned fields of ``KvCachePlan``."""

    dtype: KvDtype | None = None
    place: KvPlace | None = None
    prefetch: int | None = None
    attention: AttentionPlace | None = None
    prefix_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationPins(PinTable):
    """Pinned fields of ``GenerationPlan``; None leaves one free. Raises InvalidWorkload for values that no plan may have."""

    batch_size: int | None = None
    num_micro_batches: int | None = None
    prefill_tokens: int | Literal["all"] | None = None
    """"all" runs whole prompts at once, which a plan writes as None."""
    weights: GenerationWeightsPins = field(default_factory=GenerationWeightsPins)
    kv_cache: KvCachePins = field(default_factory=KvCachePins)
    allocator: AllocatorPins = field(default_factory=AllocatorPins)

    def __post_init__(self) -> None:
        if self.is_empty:
            return
        try:
            GenerationPlan.from_json(self.change())
        except InvalidPlan as error:
            fields = {**error.fields, "field": error.fields["field"].replace("plan.", "goal.pins.", 1)}
            raise InvalidWorkload(error.message.replace("plan.", "goal.pins.", 1), **fields) from error

    def change(self) -> dict[str, Any]:
        """The pins as a part of a plan's JSON."""
        document = self.to_json()
        if self.prefill_tokens == NO_LIMIT:
            document["prefill_tokens"] = None
        return document

    @cached_property
    def held(self) -> dict[str, Any]:
        """Pinned values by path, as a plan holds them."""
        return {path: None if value == NO_LIMIT else value for path, value in self.values()}

    def among(self, path: str, options: Iterable[V]) -> tuple[V, ...]:
        """Values that a decision may still take: the pinned one, even if it is not among the options, or else the options."""
        return (self.held[path],) if path in self.held else tuple(options)

    def broken_by(self, plan: "GenerationPlan") -> str | None:
        """The first pin that the plan breaks (``kv_cache.place``); None if it keeps all.

        A plan that fetches nothing keeps every pin on how far ahead to fetch.
        """
        for path, value in self.held.items():
            if attrgetter(path)(plan) != value and not is_idle(path, plan):
                return path
        return None

    def without(self, path: str) -> "GenerationPins":
        """Return these pins with one decision left free."""
        category, _, knob = path.rpartition(".")
        free: dict[str, Any] = {knob: None}
        if category:
            free = {category: replace(getattr(self, category), **free)}
        return replace(self, **free)
