"""Rotary position embeddings in a config: two generations of keys in, ``rope_parameters`` out.

transformers 4 writes ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``), transformers 5 one object
``rope_parameters``. Types ``dynamic`` and ``longrope`` are refused: their frequencies change with the longest position of
each batch, so a recomputed block could differ from its first run, and a profile would hold for one length only.
"""

import math
from dataclasses import replace
from typing import Any

from optimizer.models.refusal import refusal
from optimizer.models.schema.fields import Architecture

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "rope_theta": (1.0, 1e12),
    "factor": (1.0, 1e4),
    "low_freq_factor": (1e-3, 1e4),
    "high_freq_factor": (1e-3, 1e4),
    "original_max_position_embeddings": (1, 16_777_216),
    "attention_factor": (0.0, 1e4),
    "beta_fast": (1e-3, 1e4),
    "beta_slow": (1e-3, 1e4),
    "mscale": (0.0, 1e4),
    "mscale_all_dim": (0.0, 1e4),
    "partial_rotary_factor": (0.01, 1.0),
}
_LOCAL_ROPE_THETA = 10_000.0
_INTEGERS = frozenset({"original_max_position_embeddings"})


def read_rope(config: dict[str, Any], values: dict[str, Any], architecture: "Architecture") -> dict[str, Any]:
    """The validated ``rope_parameters`` of a config. ``values`` are its fields as read so far."""
    if architecture.rope_by_layer_type:
        return _read_by_layer_type(config, values, architecture)
    given = _given_parameters(config)
    config = {**{name: config[old] for old, name in architecture.rope_aliases.items() if old in config}, **config}
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(rope_type, str) or rope_type not in architecture.rope_types:
        raise refusal("rope_parameters.rope_type", rope_type, allowed=list(architecture.rope_types))
    theta = _first(given.get("rope_theta"), config.get("rope_theta"), architecture.default_rope_theta)
    parameters: dict[str, Any] = {"rope_type": rope_type, "rope_theta": _number("rope_theta", theta)}
    if architecture.partial_rotary:
        default = architecture.default_partial_rotary
        partial = _first(given.get("partial_rotary_factor"), config.get("partial_rotary_factor"), default)
        parameters["partial_rotary_factor"] = _number("partial_rotary_factor", partial)
    if rope_type != "default" and given.get("original_max_position_embeddings") is None:
        given = {**given, "original_max_position_embeddings": values["max_position_embeddings"]}
    for name in _REQUIRED[rope_type]:
        parameters[name] = _number(name, given.get(name))
    for name in _OPTIONAL[rope_type]:
        if given.get(name) is not None:
            parameters[name] = _number(name, given[name])
    _check_order(parameters)
    return parameters


def _read_by_layer_type(config: dict[str, Any], values: dict[str, Any], architecture: "Architecture") -> dict[str, Any]:
    """Old keys mean full attention; the window's have a base of their own, ``rope_local_base_freq``."""
    alone = replace(architecture, rope_by_layer_type=False)
    given = _given_parameters(config)
    if "full_attention" not in given and "sliding_attention" not in given:
        full = {"rope_parameters": given, "rope_theta": config.get("rope_theta")}
        sliding = {"rope_theta": config.get("rope_local_base_freq")}
    else:
        full, sliding = ({"rope_parameters": given.get(key)} for key in ("full_attention", "sliding_attention"))
    local = replace(alone, default_rope_theta=_LOCAL_ROPE_THETA)
    return {
        "full_attention": read_rope(full, values, alone),
        "sliding_attention": read_rope(sliding, values, local),
    }


def _given_parameters(config: dict[str, Any]) -> dict[str, Any]:
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise refusal(key, given, allowed="an object")
        return given
    return {}


def _first(*candidates: Any) -> Any:
    return next(candidate for candidate in candidates if candidate is not None)


def _number(name: str, value: Any) -> float | int:
    low, high = _RANGES[name]
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_integer or (isinstance(value, float) and math.isfinite(value) and name not in _INTEGERS)
    if not is_number or not low <= value <= high:
        noun = "an integer" if name in _INTEGERS else "a number"
        raise refusal(f"rope_parameters.{name}", value, allowed=f"{noun} from {low:,} to {high:,}")
    return int(value) if name in _INTEGERS else float(value)


def _check_order(parameters: dict[str, Any]) -> None:
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in parameters and high in parameters and parameters[low] >= parameters[high]:
            raise refusal(f"rope_parameters.{low}", parameters[low], allowed=f"less than {high} ({parameters[high]})")
