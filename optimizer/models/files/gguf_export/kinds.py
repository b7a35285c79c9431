"""Models that can be written as GGUF, and refusals in a sentence. Torch-free.

llama.cpp computes each architecture in one way, by code; what a config says otherwise would be lost without a word, so it is
refused here (llama.cpp, ``src/llama-model.cpp``; ``convert_hf_to_gguf.py``).
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from optimizer.base.errors import InvalidWorkload
from optimizer.base.shown import shown_value
from optimizer.models.spec import ModelSpec

GgufPacking = Literal["f16", "q8_0"]
ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""llama.cpp's name of each model type."""
_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh", "gemma3": "gelu_pytorch_tanh"}
_SLIDES_EVERY = {"gemma2": 2, "gemma3": 6}
"""In each group of so many blocks all but the last slide."""
_BLOCKS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Attention of these models is scaled by hidden size over heads, of all others by the width of a head."""
_LOCAL_ROPE_BASE = 10_000.0
_ROPE_KINDS = ("default", "linear", "yarn", "llama3")
_FIELD = "workload.export.gguf"


def check_gguf(spec: ModelSpec) -> None:
    """Raise InvalidWorkload for a model that llama.cpp would not compute as it was trained."""
    architecture = ARCHITECTURES.get(spec.model_type)
    if architecture is None:
        raise _refusal(
            f"{_FIELD} is set; models of type {spec.model_type} cannot be written as GGUF, allowed: {', '.join(ARCHITECTURES)}",
            spec.model_type,
            allowed=list(ARCHITECTURES),
        )
    config = spec.config
    _require(config, "activation", _activation(config), _ACTIVATIONS.get(architecture, "silu"))
    kind = rope_of(config).get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise _refusal(f"{_FIELD} is set; rope_type {kind!r} has no place in GGUF", kind, allowed=list(_ROPE_KINDS))
    if architecture == "qwen2" and config.get("use_sliding_window"):
        _require(config, "use_sliding_window", config["use_sliding_window"], wanted=False)
    if architecture in _SLIDES_EVERY:
        _check_gemma(config, architecture, num_blocks=spec.num_blocks)


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding's settings: of Gemma 3 those of the blocks that see everything."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("full_attention", found) if isinstance(found, Mapping) else {}


def rope_base(config: Mapping[str, Any]) -> float:
    found = rope_of(config).get("rope_theta", config.get("rope_theta"))
    return float(found if found is not None else _LOCAL_ROPE_BASE)


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check_gemma(config: Mapping[str, Any], architecture: str, *, num_blocks: int) -> None:
    every = _SLIDES_EVERY[architecture]
    wanted = ["sliding_attention" if (block + 1) % every else "full_attention" for block in range(num_blocks)]
    _require(config, "layer_types", list(config.get("layer_types") or wanted), wanted)
    is_27b = num_blocks == _BLOCKS_OF_27B[architecture]
    scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim(config)
    _require(config, "query_pre_attn_scalar", config.get("query_pre_attn_scalar") or scale, scale)
    if architecture == "gemma3":
        parameters = config.get("rope_parameters") or {}
        local = (parameters.get("sliding_attention") or {}).get("rope_theta", config.get("rope_local_base_freq"))
        _require(config, "rope_local_base_freq", float(local or _LOCAL_ROPE_BASE), _LOCAL_ROPE_BASE)


def _activation(config: Mapping[str, Any]) -> Any:
    return config.get("hidden_activation") or config.get("hidden_act")


def _require(config: Mapping[str, Any], name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise _refusal(
            f"{_FIELD} is set; the config's {name} is {shown_value(found)!r:.80}, and llama.cpp computes {config['model_type']} "
            f"with {shown_value(wanted)!r:.80}",
            shown_value(found),
            allowed=shown_value(wanted),
        )


def _refusal(message: str, value: Any, *, allowed: Any) -> InvalidWorkload:
    return InvalidWorkload(message, field=_FIELD, value=value, allowed=allowed, hint="Leave it at none and use the safetensors.")
