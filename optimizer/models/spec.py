"""A Hugging Face config.json becomes a ModelSpec: validated by an allow-list, and written afresh.

Torch-free and transformers-free, so that the web process may call it. What is not on the list of the model type is
dropped, hostile keys (``auto_map``, ``trust_remote_code``, ``_attn_*``, ``_experts_*``, ``custom_*``, repository ids and
paths) with the rest: nothing of the submitted document reaches transformers except numbers, booleans and listed names.
A listed key with a wrong value is an error, never a default. Both the keys of transformers 4 (``rope_theta``,
``rope_scaling``, ``torch_dtype``) and 5 (``rope_parameters``, ``dtype``) are read; those of 5 are written.
The lists themselves are in schema.py.
"""

import copy
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from optimizer.base.errors import InvalidModel, UnsupportedModelType
from optimizer.formats.shared_blocks import narrow_config
from optimizer.models.decoder.config import DECODER_TYPE, finish_decoder_config
from optimizer.models.parameters import count_parameters
from optimizer.models.refusal import refusal, shown
from optimizer.models.schema.fields import MAX_POSITIONS, Architecture, Field, ModelKind
from optimizer.models.schema.rope import read_rope
from optimizer.models.schema.schema import ARCHITECTURES

SUPPORTED_MODEL_TYPES = tuple(sorted(ARCHITECTURES))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One language model, as validated numbers. JSON-able; equal configs have equal fingerprints."""

    model_type: str
    config: dict[str, Any]
    """Every allow-listed key with its value, defaults filled in. Treat as read-only; ``to_config()`` gives a copy."""
    num_blocks: int
    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    tied_embeddings: bool
    """The output projection shares its storage with the input embeddings."""
    kind: ModelKind = "decoder"
    is_listed: bool = True
    """Read by the allow-list, whose types tests hold to measured steps; False: see any_spec.py."""
    counted_parameters: int = 0
    """Count for a model that is not listed, for which there is no formula."""

    def to_config(self) -> dict[str, Any]:
        """A fresh config.json document in the keys of transformers 5."""
        return copy.deepcopy(self.config)

    def of_rank(self, num_ranks: int) -> "ModelSpec":
        """The model that each of so many ranks builds which share every block. Raises InvalidPlan in words where they cannot."""
        return self if num_ranks == 1 else replace(self, config=narrow_config(self.config, num_ranks))

    @property
    def end_of_text_id(self) -> int | None:
        """The token that parts documents: the first where the config names several."""
        named = self.config.get("eos_token_id")
        first = named[0] if isinstance(named, list) and named else named
        return first if isinstance(first, int) else None

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied output projection counted once."""
        return count_parameters(self.model_type, self.config) if self.is_listed else self.counted_parameters

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of the config's canonical JSON: the name under which a profile of the model is kept."""
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)


def read_model_spec(config: dict[str, Any]) -> ModelSpec:
    """Validate a parsed config.json.

    Raises UnsupportedModelType, or InvalidModel that names the field, its value and what is allowed.
    """
    if not isinstance(config, dict):
        raise InvalidModel("config.json must hold one JSON object", field="config", allowed="a JSON object")
    model_type = config.get("model_type")
    if model_type is None:
        raise refusal("model_type", None, allowed=list(SUPPORTED_MODEL_TYPES))
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UnsupportedModelType(shown(model_type), supported=SUPPORTED_MODEL_TYPES)
    architecture = ARCHITECTURES[model_type]
    values = _read_fields(architecture, _with_current_names(architecture, config))
    if architecture.uses_rope:
        values["rope_parameters"] = read_rope(config, values, architecture)
    _check_shapes(architecture, values)
    _check_token_ids(architecture, values, given=config)
    _check_layer_types(values)
    if model_type == DECODER_TYPE:
        finish_decoder_config(values)
    _check_derived(architecture, values)
    return _to_spec(model_type, architecture, values)


def _with_current_names(architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Old or alternative key names become the listed ones; the listed name wins where both are given.

    null means absent, but where the architecture gives it a meaning of its own (no soft cap, no such token).
    """
    fields = architecture.fields
    document = {
        name: config[name] for name in fields if name in config and (config[name] is not None or fields[name].nullable)
    }
    for alias, name in architecture.aliases.items():
        if config.get(alias) is not None and name not in document:
            document[name] = config[alias]
    return document


def _read_fields(architecture: Architecture, document: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in architecture.fields.items():
        if name in document:
            values[name] = _checked(name, document[name], field)
        elif field.required:
            raise refusal(name, None, allowed=field.allowed)
        else:
            values[name] = copy.copy(field.default)
    return values


def _checked(name: str, value: Any, field: Field) -> Any:
    if not field.accepts(value):
        raise refusal(name, value, allowed=field.allowed)
    return field.normalized(value)


def _check_derived(architecture: Architecture, values: dict[str, Any]) -> None:
    """Sizes that follow from others keep to the same limits, so that a spec that was read can be read again."""
    for name, field in architecture.fields.items():
        size = values.get(name)
        if isinstance(size, int) and not field.accepts(size):
            raise refusal(name, size, allowed=field.allowed)


def _check_shapes(architecture: Architecture, values: dict[str, Any]) -> None:
    """The rules that tie one number to another, as the model definitions need them."""
    hidden_size = values[architecture.hidden_size_key]
    num_heads = values[architecture.num_heads_key]
    if values.get("head_dim") is None and "head_dim" in values:
        values["head_dim"] = hidden_size // num_heads
        needs_division = True
    else:
        needs_division = architecture.hidden_divides_by_heads
    if needs_division and hidden_size % num_heads:
        raise refusal(
            architecture.hidden_size_key,
            hidden_size,
            allowed=f"a multiple of {architecture.num_heads_key} ({num_heads})",
        )
    if "num_key_value_heads" in values:
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = num_heads
        if num_heads % values["num_key_value_heads"]:
            raise refusal(
                "num_key_value_heads",
                values["num_key_value_heads"],
                allowed=f"a divisor of {architecture.num_heads_key} ({num_heads})",
            )
    if architecture.uses_rope and _rotary_dim(architecture, values) % 2:
        raise refusal(
            "head_dim", _rotary_dim(architecture, values), allowed="an even number, as rotary embeddings need"
        )
    num_experts = values.get(architecture.num_experts_key, 0)
    if values.get("num_experts_per_tok", 0) > num_experts:
        allowed = f"1 to {architecture.num_experts_key} ({num_experts})"
        raise refusal("num_experts_per_tok", values["num_experts_per_tok"], allowed=allowed)
    _check_more_heads(architecture, values)


def _check_more_heads(architecture: Architecture, values: dict[str, Any]) -> None:
    hidden_size, num_heads = values[architecture.hidden_size_key], values[architecture.num_heads_key]
    for key in architecture.more_heads_keys:
        if hidden_size % values[key]:
            raise refusal(key, values[key], allowed=f"a divisor of {architecture.hidden_size_key} ({hidden_size})")
    if "num_kv_heads" in values:
        values["num_kv_heads"] = num_kv_heads = values["num_kv_heads"] or num_heads
        if num_heads % num_kv_heads:
            allowed = f"a divisor of {architecture.num_heads_key} ({num_heads})"
            raise refusal("num_kv_heads", num_kv_heads, allowed=allowed)
        values["ffn_hidden_size"] = values["ffn_hidden_size"] or 4 * hidden_size
    if any(block >= values[architecture.num_blocks_key] for block in values.get("mlp_only_layers") or ()):
        allowed = f"0 to {values[architecture.num_blocks_key] - 1} ({architecture.num_blocks_key} - 1)"
        raise refusal("mlp_only_layers", values["mlp_only_layers"], allowed=allowed)


def _rotary_dim(architecture: Architecture, values: dict[str, Any]) -> int:
    head_dim = values.get("head_dim") or values[architecture.hidden_size_key] // values[architecture.num_heads_key]
    return int(head_dim * values["rope_parameters"].get("partial_rotary_factor", 1.0))


def _check_token_ids(architecture: Architecture, values: dict[str, Any], *, given: dict[str, Any]) -> None:
    """Special tokens lie inside the vocabulary; a default that does not fit a small vocabulary is left out."""
    vocab_size = values["vocab_size"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = values.get(name)
        ids = value if isinstance(value, list) else [value]
        if any(token is not None and token >= vocab_size for token in ids):
            if given.get(name) is not None or not architecture.fields[name].nullable:
                raise refusal(name, value, allowed=f"0 to {vocab_size - 1} (vocab_size - 1)")
            values[name] = None


def _check_layer_types(values: dict[str, Any]) -> None:
    layer_types = values.get("layer_types")
    if layer_types is None:
        values.pop("layer_types", None)
        return
    if len(layer_types) != values["num_hidden_layers"]:
        raise refusal("layer_types", layer_types, allowed=f"one entry for each of {values['num_hidden_layers']} layers")
    if "sliding_attention" in layer_types and values.get("sliding_window") is None:
        raise refusal("sliding_window", None, allowed="a number of tokens, because layer_types holds sliding_attention")


def _to_spec(model_type: str, architecture: Architecture, values: dict[str, Any]) -> ModelSpec:
    num_blocks = values[architecture.num_blocks_key]
    if architecture.num_decoder_blocks_key is not None:
        key = architecture.num_decoder_blocks_key
        values[key] = values[key] or num_blocks
        num_blocks += values[key]
    config = {"model_type": model_type, "architectures": [architecture.class_name], **values}
    return ModelSpec(
        model_type=model_type,
        config=config,
        num_blocks=num_blocks,
        vocab_size=values["vocab_size"],
        hidden_size=values[architecture.hidden_size_key],
        max_sequence_length=_max_sequence_length(architecture, values),
        tied_embeddings=values["tie_word_embeddings"],
        kind=architecture.kind,
    )


def _max_sequence_length(architecture: Architecture, values: dict[str, Any]) -> int:
    if architecture.max_positions_key is None:
        return MAX_POSITIONS
    positions: int = values[architecture.max_positions_key]
    if not architecture.positions_follow_padding:
        return positions
    first = 1 + (values["pad_token_id"] if values["pad_token_id"] is not None else 0)
    if positions <= first:
        key = architecture.max_positions_key
        raise refusal(key, positions, allowed=f"more than {first}: positions are counted from pad_token_id + 1")
    return positions - first
