"""The values of a config.json for the keys that a configuration class of transformers declares.

Each must have one of the JSON types that the class declares for the key, be a number within bounds, a plain word, or a short list
or object of such. Names that the class keeps for others (``attribute_map``, in both directions) and the older keys of rotary
positions are read. Of keys that the class does not declare only numbers are taken, and only those that the model's own source
reads (DBRX's ``rope_theta``); the others are dropped. A part with a class of its own (``text_config``) is read by that class.
"""

import dataclasses
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from optimizer.base.errors import InvalidModel
from optimizer.models.refusal import refusal

MAX_LAYERS = 512
MAX_NUMBER = 2**27
"""Largest integer in a config: more than any width, vocabulary or number of positions published."""
_MAX_ITEMS = 1_024
_MAX_DEPTH = 3
_MAX_PARTS = 3
"""Parts within parts."""
_WORD = re.compile(r"[A-Za-z0-9_\-+.]{1,64}")
_OURS = frozenset({"chunk_size_feed_forward", "id2label", "label2id", "output_hidden_states", "problem_type", "return_dict"})
"""Keys of every configuration class; they label outputs or change what a forward returns."""
_ALWAYS_OURS = frozenset({"architectures", "dtype", "is_encoder_decoder", "transformers_version", "use_cache"})
_AT_LEAST_ONE = re.compile(r"(^|_)(size|dim|heads|head|layers|layer|experts|embd|positions)$|^d_(model|ff|kv)$")
_NUMBER_OF_LAYERS = re.compile(r"(^|_)layers?$")
_OLDER_ROPE: dict[str, Any] = {"rope_theta": float, "rope_local_base_freq": float, "rope_scaling": dict}
"""Keys that a class with ``rope_parameters`` still takes, as do a few the next."""
_OLDER_PATTERN: dict[str, Any] = {"sliding_window_pattern": int}
_FLOAT_TAG = "__float__"
"""transformers' name for a number that JSON has no text for."""
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a number", (int, float)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    list: ("a list", (list, tuple)),
    tuple: ("a list", (list, tuple)),
    dict: ("an object", (dict,)),
}
"""Names of declared types, each with the Python types that JSON may give for it."""


def read_declared(config_class: Any, config: Mapping[str, Any], *, path: str = "", depth: int = 0) -> dict[str, Any]:
    """The values of the keys that the class declares. path: of the part that this is.

    Raises InvalidModel, which names the field.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    parts = getattr(config_class, "sub_configs", {})
    values: dict[str, Any] = {}
    for name, declared, default in _list_keys(config_class, fields):
        value = config.get(name)
        if value is None or name in values:
            continue
        where = f"{path}{name}"
        if name in parts and isinstance(value, dict) and depth < _MAX_PARTS:
            part_class = _class_of_part(config_class, name, value, where=where)
            own = {"model_type": value["model_type"]} if "model_type" in value else {}
            values[name] = own | read_declared(part_class, value, path=f"{where}.", depth=depth + 1)
        else:
            values[name] = _checked(where, value, declared=declared, default=default)
    source = _source_of_model(config_class)
    for name, value in config.items():
        if name not in values and isinstance(value, int | float) and _is_read(name, config_class, source):
            values[name] = _plain(f"{path}{name}", value, depth=0)
    return values


def decode_numbers(value: Any) -> Any:
    """A config's values with the numbers that JSON has no text for."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT_TAG}:
            return float(value[_FLOAT_TAG])
        return {name: decode_numbers(item) for name, item in value.items()}
    return [decode_numbers(item) for item in value] if isinstance(value, list) else value


def _list_keys(config_class: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every key that a config.json may have, with its declared type and its default."""
    for name, field in fields.items():
        if not name.startswith("_") and name not in _OURS and name not in _ALWAYS_OURS:
            yield name, field.type, _default_of(field)
    for alias, name in getattr(config_class, "attribute_map", {}).items():
        if name in fields and alias not in fields and alias not in _OURS | _ALWAYS_OURS:
            yield alias, fields[name].type, _default_of(fields[name])
    for name, stored in getattr(config_class, "attribute_map", {}).items():
        if name in fields and stored not in fields and stored not in _OURS | _ALWAYS_OURS:
            yield stored, fields[name].type, _default_of(fields[name])
    older = (_OLDER_ROPE if "rope_parameters" in fields else {}) | (_OLDER_PATTERN if "layer_types" in fields else {})
    for name, declared in older.items():
        if name not in fields:
            yield name, declared, None


def _source_of_model(config_class: Any) -> str:
    """The text of the module that defines the models of a configuration class; empty where another type's models serve."""
    configuration = Path(sys.modules[config_class.__module__].__file__ or "")
    file = configuration.with_name(configuration.name.replace("configuration_", "modeling_"))
    return file.read_text() if file != configuration and file.is_file() else ""


def _is_read(name: str, config_class: Any, source: str) -> bool:
    is_free = name.isidentifier() and not name.startswith("_") and not hasattr(config_class, name)
    is_free = is_free and name not in _OURS | _ALWAYS_OURS | set(config_class.attribute_map)
    return is_free and re.search(rf"config\.{name}\b", source) is not None


def _default_of(field: Any) -> Any:
    made = field.default_factory() if callable(field.default_factory) else field.default
    return None if made is dataclasses.MISSING else made


def _class_of_part(config_class: Any, name: str, value: Mapping[str, Any], *, where: str) -> Any:
    """The class of a part: the one declared, or the one of the model type that the part names, or else has unless it is named."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

    declared = config_class.sub_configs[name]
    if declared is not AutoConfig:
        return declared
    spec = getattr(config_class, "sub_configs_defaults", {}).get(name)
    model_type = value.get("model_type") or getattr(spec, "model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise refusal(f"{where}.model_type", model_type, allowed="a model type that transformers knows")
    return CONFIG_MAPPING[model_type]


def _checked(name: str, value: Any, *, declared: Any, default: Any) -> Any:
    kinds = {kind for kind in _list_kinds(declared) if kind in _KINDS}
    if not kinds and default is not None:
        kinds = {kind for kind in _KINDS if type(default) is kind}
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        raise refusal(name, value, allowed=" or ".join(sorted({_KINDS[kind][0] for kind in kinds})))
    value = _plain(name, value, depth=0)
    short = name.rpartition(".")[2]
    if _AT_LEAST_ONE.search(short) and isinstance(value, int) and value < 1 and value != default:
        raise refusal(name, value, allowed=f"an integer from 1 to {MAX_NUMBER:,}")
    if _NUMBER_OF_LAYERS.search(short) and isinstance(value, int) and value > MAX_LAYERS:
        raise refusal(name, value, allowed=f"an integer from 1 to {MAX_LAYERS}")
    return value


def _list_kinds(declared: Any) -> Iterator[Any]:
    """Plain types in a declared one: ``list[int] | None`` has ``list``, a choice of words has ``str``."""
    origin = get_origin(declared)
    if origin in (Union, types.UnionType):
        for each in get_args(declared):
            yield from _list_kinds(each)
    elif origin is Literal:
        yield from {type(each) for each in get_args(declared)}
    elif isinstance(declared, type) and issubclass(declared, dict):
        yield dict
    else:
        yield origin or declared


def _is_of(value: Any, kind: Any) -> bool:
    is_bool = isinstance(value, bool)
    return is_bool if kind is bool else isinstance(value, _KINDS[kind][1]) and not is_bool


def _plain(name: str, value: Any, *, depth: int) -> Any:
    """A value of plain numbers and words, as JSON has it."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        if isinstance(value, float) and not math.isfinite(value):
            return {_FLOAT_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
        if not abs(value) <= MAX_NUMBER * 2**20 or (isinstance(value, int) and abs(value) > MAX_NUMBER):
            raise refusal(name, value, allowed=f"a number up to {MAX_NUMBER:,}")
        return value
    if isinstance(value, str):
        if not _WORD.fullmatch(value):
            raise refusal(name, value, allowed="a word of at most 64 letters, digits and any of _-+.")
        return value
    if isinstance(value, dict):
        return _plain_object(name, value, depth=depth)
    if not isinstance(value, list | tuple) or len(value) > _MAX_ITEMS or depth >= _MAX_DEPTH:
        raise _too_large(name, value)
    return [_plain(name, item, depth=depth + 1) for item in value]


def _plain_object(name: str, value: dict[Any, Any], *, depth: int) -> dict[str, Any]:
    if set(value) == {_FLOAT_TAG}:
        if value[_FLOAT_TAG] not in ("NaN", "Infinity", "-Infinity"):
            raise refusal(name, value, allowed="NaN, Infinity or -Infinity")
        return value
    if len(value) > _MAX_ITEMS or depth >= _MAX_DEPTH:
        raise _too_large(name, value)
    for key in value:
        if not isinstance(key, str) or not _WORD.fullmatch(key):
            raise refusal(name, key, allowed="keys that are words")
    return {key: _plain(name, item, depth=depth + 1) for key, item in value.items()}


def _too_large(name: str, value: Any) -> InvalidModel:
    return refusal(name, value, allowed=f"a list or object of at most {_MAX_ITEMS:,} plain values")
