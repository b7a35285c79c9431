"""The single decisions of a generation's plan: their types, their written form, and plans with some of them changed.

They are the fields of the plan that have a face for generations, in the order of the plan; not those of several devices, which
the search alone decides.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload
from optimizer.base.serialize import from_json
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation import NO_LIMIT, GenerationPins
from optimizer.plan.techniques import KNOBS


def generation_knobs() -> dict[str, Any]:
    """Types of the knobs' values by path (``kv_cache.place``), in the order of the plan."""
    return dict(_knobs_of(GenerationPlan, ""))


def _knobs_of(kind: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        path, of_field = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(of_field):
            yield from _knobs_of(typing.cast(type, of_field), f"{path}.")
        elif path in KNOBS and KNOBS[path].generation is not None and KNOBS[path].num_devices == 1:
            yield path, of_field


def knob_value(plan: GenerationPlan, path: str) -> Any:
    value: Any = plan
    for name in path.split("."):
        value = getattr(value, name)
    return value


def change_generation(plan: GenerationPlan, change: Mapping[str, Any]) -> GenerationPlan:
    """Return the plan with a change, a part of a plan's JSON such as ``{"kv_cache": {"dtype": "int8"}}``.

    Raises InvalidPlan if the change is no part of a plan, or if the changed plan contradicts itself.
    """
    return from_json(GenerationPlan, _merged(plan.to_json(), change), path="change", error=InvalidPlan)


def _merged(document: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        name: _merged(document[name], value) if isinstance(document.get(name), dict) and isinstance(value, dict) else value
        for name, value in change.items()
    }
    return {**document, **parts}


def with_knob(plan: GenerationPlan, path: str, value: Any) -> GenerationPlan:
    """Return the plan with one decision changed. Raises InvalidPlan if it then contradicts itself."""
    return change_generation(plan, _nested(path, value))


def read_generation_change(texts: Iterable[str]) -> dict[str, Any]:
    """Read texts such as ``kv_cache.place=host``, one a knob, into a part of a plan's JSON. Raises InvalidPlan that names the
    knobs.
    """
    return _read_texts(texts, what="change", field="change", error=InvalidPlan)


def read_generation_pins(texts: Iterable[str]) -> GenerationPins:
    """Read the same texts into pins of a goal. Raises InvalidWorkload that names the knobs, or the values of one."""
    part = _read_texts(texts, what="pin", field="goal.pins", error=InvalidWorkload)
    return from_json(GenerationPins, _with_limits(part), path="goal.pins", error=InvalidWorkload)


def pins_of_generation_change(before: GenerationPlan, after: GenerationPlan) -> GenerationPins:
    """Pins that turn one plan into the other: the knobs on which they differ."""
    found = {path: knob_value(after, path) for path in generation_knobs() if knob_value(after, path) != knob_value(before, path)}
    part = functools.reduce(_merged, (_nested(path, value) for path, value in found.items()), dict[str, Any]())
    return from_json(GenerationPins, _with_limits(part), path="goal.pins", error=InvalidWorkload)


def _with_limits(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a plan's JSON as pins hold it, in which None means free."""
    return {
        name: _with_limits(value) if isinstance(value, Mapping) else NO_LIMIT if value is None else value
        for name, value in part.items()
    }


def _read_texts(texts: Iterable[str], *, what: str, field: str, error: type[InvalidInput]) -> dict[str, Any]:
    knobs, change = generation_knobs(), dict[str, Any]()
    for text in texts:
        path, is_given, written = (part.strip() for part in text.partition("="))
        if path not in knobs or not is_given:
            raise error(
                f"{what} {text[:80]!r} is not understood; allowed: KNOB=VALUE with one of {', '.join(knobs)}",
                field=field,
                value=text[:80],
                allowed=list(knobs),
            )
        change = _merged(change, _nested(path, _read(written, knobs[path])))
    return change


def written_knobs(plan: GenerationPlan) -> dict[str, str]:
    """Written values of all knobs by path, as ``read_generation_change`` reads them."""
    return {path: written_value(knob_value(plan, path)) for path in generation_knobs()}


def _nested(path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {name: _nested(rest, value) if rest else value}


def written_value(value: Any) -> str:
    """The text for one knob's value, as ``read_generation_change`` reads it."""
    if value is None:
        return NO_LIMIT
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(written: str, kind: Any) -> Any:
    """Convert a written value to its JSON form; a text that is no number stays a text, and is refused by name later."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and written == NO_LIMIT:
        return None
    if bool in options:
        return {"true": True, "false": False}.get(written.lower(), written)
    for number in (int, float):
        if number in options:
            try:
                return number(written)
            except ValueError:
                return written
    return written
