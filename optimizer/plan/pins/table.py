"""The pins of training and generation plans alike: a plan's table with most cells empty, None where a decision is free."""

import dataclasses
import typing
from collections.abc import Iterator
from functools import cached_property
from typing import Any, cast

from optimizer.base.serialize import to_json
from optimizer.plan.techniques import KNOBS, Technique


class PinTable:
    """Base of frozen dataclasses whose fields each hold one decision, or the pins of one category."""

    def values(self) -> tuple[tuple[str, Any], ...]:
        """Pinned decisions, such as (``optimizer_state.bits``, 8), in the order of the plan."""
        return self._values

    @cached_property
    def _values(self) -> tuple[tuple[str, Any], ...]:
        return tuple(_list_values(self, ""))

    @property
    def is_empty(self) -> bool:
        return not self._values

    def techniques(self) -> "Iterator[tuple[str, Technique]]":
        """Pairs of a pin and the technique it asks for, whatever the rest of the plan does."""
        pinned = dict(self.values())
        for path, value in pinned.items():
            knob = KNOBS[path]
            if all(c.path in pinned and c.holds(pinned[c.path]) for c in knob.matters_where):
                yield from ((path, cast(Technique, use.technique)) for use in knob.uses if use.asks(value))

    def to_json(self) -> dict[str, Any]:
        """JSON of the pinned decisions alone."""
        document: dict[str, Any] = {}
        for path, value in self.values():
            *categories, knob = path.split(".")
            part = document
            for category in categories:
                part = part.setdefault(category, {})
            part[knob] = to_json(value)
        return document


def _list_values(table: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            yield from _list_values(value, f"{prefix}{field.name}.")
        elif value is not None:
            yield f"{prefix}{field.name}", value


def kinds_of_pins(table: type, prefix: str = "") -> dict[str, Any]:
    """Types of the knobs' values, by path."""
    found: dict[str, Any] = {}
    for field, kind in typing.get_type_hints(table).items():
        if dataclasses.is_dataclass(kind):
            found |= kinds_of_pins(typing.cast(type, kind), f"{prefix}{field}.")
        else:
            found[f"{prefix}{field}"] = next(part for part in typing.get_args(kind) if part is not type(None))
    return found


def shown_pin(value: object) -> str:
    """Write a pinned value for people: ``bf16``; for blocks, their distinct choices."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(dict.fromkeys(map(str, value))) if isinstance(value, tuple) else str(value)


def listed_pins(pins: PinTable) -> str:
    """Write all pins in one line: ``weights.place host, batch_size 4``."""
    return ", ".join(f"{path} {shown_pin(value)}" for path, value in pins.values())
