"""A config.json of any model type that transformers knows becomes a ModelSpec: for the library and the command line.

Not for the service, whose allow-list (schema.py) is its security. A type on that list is read by it. Of any other, only the keys
that transformers' own configuration class declares are taken, only with values of the same JSON type as the class's default,
numbers within bounds and texts that are plain words: no code, no paths, no repository names, no network. What cannot be a model
ends in InvalidModel; what can, is built once without data, to count its parameters and find its blocks.

Predictions for such a model say that no test holds them to a measurement (``ModelSpec.is_listed``).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from optimizer.base.errors import InvalidModel, UnsupportedModelType
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model, go_offline
from optimizer.models.refusal import refusal, shown
from optimizer.models.schema.fields import MAX_POSITIONS, MAX_VOCAB_SIZE, ModelKind
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import SUPPORTED_MODEL_TYPES, ModelSpec, read_model_spec

MAX_LAYERS = 512
MAX_NUMBER = 2**24
"""Largest integer in a config: more than any width, vocabulary or number of positions published."""
MAX_PARAMETERS = 10**13
_MAX_ITEMS = 1_024
_MAX_DEPTH = 3
_WORD = re.compile(r"[A-Za-z0-9_\-+.]{1,64}")
_OURS = frozenset({"chunk_size_feed_forward", "id2label", "label2id", "output_hidden_states", "problem_type", "return_dict"})
"""Keys of every configuration class; they label outputs or change what a forward returns."""
_ALWAYS_OURS = frozenset({"architectures", "dtype", "is_encoder_decoder", "transformers_version", "use_cache"})
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
_AT_LEAST_ONE = re.compile(r"(^|_)(size|dim|heads|head|layers|layer|experts|embd|positions)$|^d_(model|ff|kv)$")


def read_any_spec(config: dict[str, Any]) -> ModelSpec:
    """Read a config as ``read_model_spec`` does, and beyond its list. A model is built without data: a second, more for
    a deep one.

    Raises UnsupportedModelType for what transformers does not know as a language model, InvalidModel that names the field.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or model_type in ARCHITECTURES:
        return read_model_spec(config)
    kind, class_name = _find_kind(model_type, config)
    values = _read_declared(_config_class(model_type), config)
    document = {"model_type": model_type, "architectures": [class_name], **values}
    return _describe(model_type, kind, document)


def _find_kind(model_type: str, config: Mapping[str, Any]) -> tuple[ModelKind, str]:
    """The class to train it as: the one that ``architectures`` names, else the first of these that there is."""
    go_offline()
    from transformers.models.auto import modeling_auto

    tables: dict[ModelKind, Mapping[str, Any]] = {
        "encoder_decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    found = {kind: table[model_type] for kind, table in tables.items() if model_type in table}
    named = config.get("architectures")
    for kind, class_name in found.items():
        if isinstance(named, list) and class_name in named:
            return kind, class_name
    if not found:
        raise UnsupportedModelType(shown(model_type), supported=SUPPORTED_MODEL_TYPES)
    return next(iter(found.items()))


def _config_class(model_type: str) -> Any:
    from transformers import AutoConfig

    return type(AutoConfig.for_model(model_type))


def _read_declared(config_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        if name.startswith("_") or name in _OURS or name in _ALWAYS_OURS or config.get(name) is None:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        values[name] = _checked(name, config[name], default)
    return values


def _checked(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool) != isinstance(value, bool) and default is not None:
        raise refusal(name, value, allowed=_json_type(default))
    numbers = (int, float)
    is_like = (
        default is None
        or default is dataclasses.MISSING
        or (isinstance(default, numbers) and isinstance(value, numbers))
        or isinstance(value, type(default))
        or (isinstance(default, list | tuple) and isinstance(value, list))
    )
    if not is_like:
        raise refusal(name, value, allowed=_json_type(default))
    _check_value(name, value, depth=0)
    if _AT_LEAST_ONE.search(name) and isinstance(value, int) and value < 1:
        raise refusal(name, value, allowed=f"an integer from 1 to {MAX_NUMBER:,}")
    if re.search(r"(^|_)layers?$", name) and isinstance(value, int) and value > MAX_LAYERS:
        raise refusal(name, value, allowed=f"an integer from 1 to {MAX_LAYERS}")
    return value


def _check_value(name: str, value: Any, *, depth: int) -> None:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        if not abs(value) <= MAX_NUMBER * 2**20 or (isinstance(value, int) and abs(value) > MAX_NUMBER):
            raise refusal(name, value, allowed=f"a number up to {MAX_NUMBER:,}")
        return
    if isinstance(value, str):
        if not _WORD.fullmatch(value):
            raise refusal(name, value, allowed="a word of at most 64 letters, digits and any of _-+.")
        return
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list) or len(items) > _MAX_ITEMS or depth >= _MAX_DEPTH:
        raise refusal(name, value, allowed=f"a list or object of at most {_MAX_ITEMS:,} plain values")
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str) or not _WORD.fullmatch(key):
            raise refusal(name, key, allowed="keys that are words")
    for item in items:
        _check_value(name, item, depth=depth + 1)


def _json_type(default: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", dict: "an object"}
    return next((text for kind, text in names.items() if isinstance(default, kind)), "a list")


def _describe(model_type: str, kind: ModelKind, document: dict[str, Any]) -> ModelSpec:
    spec = ModelSpec(
        model_type=model_type,
        config=document,
        num_blocks=1,
        vocab_size=2,
        hidden_size=1,
        max_sequence_length=MAX_POSITIONS,
        tied_embeddings=bool(document.get("tie_word_embeddings", True)),
        kind=kind,
        is_listed=False,
    )
    model = _build(spec)
    config: Any = model.config
    vocab_size, hidden_size = getattr(config, "vocab_size", None), getattr(config, "hidden_size", None)
    if not isinstance(vocab_size, int) or not 2 <= vocab_size <= MAX_VOCAB_SIZE:
        raise refusal("vocab_size", vocab_size, allowed=f"an integer from 2 to {MAX_VOCAB_SIZE:,}")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise refusal("config", num_parameters, allowed=f"at most {MAX_PARAMETERS:,} parameters")
    try:
        num_blocks = len(find_blocks(model))
    except LookupError as error:
        raise InvalidModel(f"the model cannot be traced: {error}", field="config", value=model_type) from error
    positions = [getattr(config, name, None) for name in _POSITIONS]
    return dataclasses.replace(
        spec,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        hidden_size=hidden_size if isinstance(hidden_size, int) else 1,
        max_sequence_length=next((count for count in positions if isinstance(count, int) and count > 0), MAX_POSITIONS),
        counted_parameters=num_parameters,
    )


def _build(spec: ModelSpec) -> nn.Module:
    try:
        return build_model(spec, device="meta")
    except InvalidModel:
        raise
    except Exception as error:
        # Whatever a model definition makes of numbers that do not go together; its words name them best.
        raise InvalidModel(
            f"transformers cannot build a {spec.model_type} of this config: {type(error).__name__}: {str(error)[:300]}",
            field="config",
            value=spec.model_type,
            hint="Check that sizes divide as the model type needs (hidden size by heads, heads by groups).",
        ) from error
