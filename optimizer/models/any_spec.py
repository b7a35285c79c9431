"""A config.json of any model type that transformers knows becomes a ModelSpec: for the library and the command line.

Not for the service, whose allow-list (schema.py) is its security. A type on that list is read by it. Of any other, only the keys
that transformers' own configuration class declares are taken, only with values of the JSON types that it declares
(``declared.py``): no code, no paths, no repository names, no network. What cannot be a model ends in InvalidModel; what can, is
built once without data, to count its parameters and find its blocks. A model of several parts is trained on text alone
(``build.py``).

Predictions for such a model say that no test holds them to a measurement (``ModelSpec.is_listed``).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from optimizer.base.errors import InvalidModel, UnsupportedModelType
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model, find_config_class, find_model_class, go_offline
from optimizer.models.declared import read_declared
from optimizer.models.refusal import refusal, shown
from optimizer.models.schema.fields import MAX_POSITIONS, MAX_VOCAB_SIZE, ModelKind
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import SUPPORTED_MODEL_TYPES, ModelSpec, read_model_spec

MAX_PARAMETERS = 10**13
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")


def read_any_spec(config: dict[str, Any]) -> ModelSpec:
    """Read a config as ``read_model_spec`` does, and beyond its list. A model is built without data: a second, more for
    a deep one. A listed type whose config names another of its language models (``BertLMHeadModel``) is read as that one.

    Raises UnsupportedModelType for what transformers does not know as a language model, InvalidModel that names the field.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or _is_of_list(model_type, config):
        return read_model_spec(config)
    kind, class_name = _find_kind(model_type, config)
    config_class = find_config_class(model_type)
    text_class = getattr(config_class, "sub_configs", {}).get("text_config")
    if text_class is not None and text_class is find_model_class(model_type, class_name).config_class:
        # A model of text alone, in the config of one that has more parts.
        model_type, config_class, config = text_class.model_type, text_class, config.get("text_config") or {}
    values = read_declared(config_class, config)
    document = {"model_type": model_type, "architectures": [class_name], **values}
    return _describe(model_type, kind, document)


def _is_of_list(model_type: str, config: Mapping[str, Any]) -> bool:
    if model_type not in ARCHITECTURES:
        return False
    named = config.get("architectures")
    if not isinstance(named, list) or not named or ARCHITECTURES[model_type].class_name in named:
        return True
    return all(table.get(model_type) not in named for table in _list_tables().values())


def _find_kind(model_type: str, config: Mapping[str, Any]) -> tuple[ModelKind, str]:
    """The class to train it as: the one that ``architectures`` names, else the first of these that there is."""
    found = {kind: table[model_type] for kind, table in _list_tables().items() if model_type in table}
    named = config.get("architectures")
    for kind, class_name in found.items():
        if isinstance(named, list) and class_name in named:
            return kind, class_name
    if not found:
        raise UnsupportedModelType(shown(model_type), supported=SUPPORTED_MODEL_TYPES)
    return next(iter(found.items()))


def _list_tables() -> dict[ModelKind, Mapping[str, str]]:
    """transformers' classes of language models by kind and model type."""
    go_offline()
    from transformers.models.auto import modeling_auto

    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {
        "encoder_decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "decoder": {**with_images, **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES},
    }


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
    whole: Any = model.config
    config = getattr(whole, "text_config", None) or whole
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
