"""Frozen dataclasses to JSON and back, strictly: unknown keys, missing keys and wrong types are refused by name.

Handles what the project's value types use: nested dataclasses, tuples (homogeneous ``tuple[T, ...]`` or fixed), dicts with
string keys, ``Literal``, ``T | None``, ``int | Literal``, int, float, str, bool. Floats accept ints. Not a general library on
purpose.
"""

import dataclasses
import functools
import reprlib
import types
import typing
from typing import Any, TypeVar

from optimizer.base.errors import InvalidInput
from optimizer.base.shown import shown_value

T = TypeVar("T")
_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def to_json(value: Any) -> Any:
    """JSON-able copy of a value type: dataclasses become dicts, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


class WithJson:
    """Gives a value type ``to_json``."""

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document


def from_json(kind: type[T], document: Any, *, path: str = "", error: type[InvalidInput] = InvalidInput) -> T:
    """Build ``kind`` from parsed JSON. Raises ``error`` with the dotted path of the first field that is wrong."""
    return typing.cast(T, _read_value(kind, document, path or kind.__name__.lower(), error))


def _read_value(kind: Any, document: Any, path: str, error: type[InvalidInput]) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), document, path, error)
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if document not in allowed or isinstance(document, bool) != any(isinstance(a, bool) for a in allowed):
            raise _wrong_value(path, document, allowed=list(allowed), error=error)
        return document
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if document is None and type(None) in options:
            return None
        inner = [option for option in options if option is not type(None)]
        if any(typing.get_origin(option) is typing.Literal and document in typing.get_args(option) for option in inner[1:]):
            return document
        return _read_value(inner[0], document, path, error)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), document, path, error)
    if origin is dict:
        if not isinstance(document, dict):
            raise _wrong_value(path, document, allowed="an object", error=error)
        value_kind = typing.get_args(kind)[1]
        return {str(key): _read_value(value_kind, item, f"{path}.{key}", error) for key, item in document.items()}
    if kind is Any:
        return document
    return _read_scalar(kind, document, path, error)


def _read_dataclass(kind: type, document: Any, path: str, error: type[InvalidInput]) -> Any:
    if not isinstance(document, dict):
        raise _wrong_value(path, document, allowed="an object", error=error)
    fields = _fields_of(kind)
    if not document.keys() <= fields.keys():
        unknown = sorted(document.keys() - fields.keys())
        raise error(
            f"{path}.{unknown[0]:.80} is not a known field; known: {', '.join(fields)}",
            field=f"{path}.{unknown[0]:.80}",
            value=shown_value(document[unknown[0]]),
            allowed=list(fields),
        )
    values = {}
    for name, (field_kind, is_required) in fields.items():
        if name in document:
            values[name] = _read_value(field_kind, document[name], f"{path}.{name}", error)
        elif is_required:
            raise error(f"{path}.{name} is missing", field=f"{path}.{name}", allowed=_KINDS.get(field_kind, str(field_kind)))
    return kind(**values)


@functools.cache
def _fields_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Type of each field by name, and true if it is required. Cached: resolving annotations costs more than reading values."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def _read_tuple(arguments: tuple[Any, ...], document: Any, path: str, error: type[InvalidInput]) -> tuple[Any, ...]:
    if not isinstance(document, list | tuple):
        raise _wrong_value(path, document, allowed="a list", error=error)
    is_open = len(arguments) == 2 and arguments[1] is Ellipsis
    expects_ints = arguments[0] is int and (is_open or arguments == (int,) * len(document))
    if expects_ints and all(type(item) is int for item in document):
        return tuple(document)  # long documents are mostly lists of integers
    if is_open:
        return tuple(_read_value(arguments[0], item, f"{path}[{index}]", error) for index, item in enumerate(document))
    if len(document) != len(arguments):
        raise _wrong_value(path, document, allowed=f"a list of {len(arguments)}", error=error)
    return tuple(
        _read_value(kind, item, f"{path}[{index}]", error)
        for index, (kind, item) in enumerate(zip(arguments, document, strict=True))
    )


def _read_scalar(kind: Any, document: Any, path: str, error: type[InvalidInput]) -> Any:
    if kind is float and isinstance(document, int) and not isinstance(document, bool):
        try:
            return float(document)
        except OverflowError:
            raise _wrong_value(path, document, allowed="a number of at most 1.8e308", error=error) from None
    if not isinstance(document, kind) or (isinstance(document, bool) and kind is not bool):
        raise _wrong_value(path, document, allowed=_KINDS.get(kind, kind.__name__), error=error)
    return document


def _wrong_value(path: str, value: Any, *, allowed: Any, error: type[InvalidInput]) -> InvalidInput:
    listed = ", ".join(map(str, allowed)) if isinstance(allowed, list) else allowed
    return error(f"{path} is {reprlib.repr(value)}; allowed: {listed}", field=path, value=shown_value(value), allowed=allowed)


