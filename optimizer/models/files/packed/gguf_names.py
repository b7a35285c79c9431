"""Makes a config.json of a GGUF file's metadata, and transformers' tensor names of its own. Torch-free.

Kinds: Llama and Mistral (one architecture in GGUF), Qwen 2, 2.5 and 3, Gemma 1, 2 and 3 (text). Sources: llama.cpp's
``convert_hf_to_gguf.py`` and ``gguf-py/gguf/constants.py``. Experts, and rope scaling that no config can say, are refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.base.errors import InvalidModel
from optimizer.models.files.packed.gguf_file import GgufHeader, GgufTensor

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names in Gemma 2 and 3, whose blocks have four norms."""
_SKIPPED = frozenset({"rope_freqs.weight"})
_BLOCK = re.compile(r"blk\.(?P<block>\d+)\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)")
_MAX_BLOCKS = 1_000
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """A GGUF file as a model that transformers knows."""

    config: dict[str, Any]
    """A config.json, not validated yet."""
    names: Mapping[str, str]
    """Transformers' name of each tensor that is read."""


def find_gguf(folder: str | Path) -> Path | None:
    """The one GGUF file of a folder without safetensors. Raises InvalidModel where there are several."""
    root = Path(folder)
    if not root.is_dir() or any(root.glob("*.safetensors")):
        return None
    found = sorted(root.glob("*.gguf"))
    if len(found) > 1:
        raise _invalid(f"{len(found)} GGUF files", allowed="one; merge a split file with gguf-split, or name the file itself")
    return found[0] if found else None


def read_gguf_model(header: GgufHeader, rope_factors: np.ndarray[Any, Any] | None = None) -> GgufModel:
    """Config and names. Raises InvalidModel.

    rope_factors: the numbers of ``rope_freqs.weight``, which Llama 3 files have in place of a name for their scaling.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise _invalid(f"architecture {architecture!r:.60}", allowed=", ".join(_MODEL_TYPES))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if header.metadata.get("split.count", 0) > 1:
        raise _invalid("one part of a split file", allowed="a whole file; merge it with gguf-split")
    if any("_exps." in name or ".ffn_gate_inp." in name for name in tensors):
        raise _invalid("a mixture of experts", allowed="dense models; use its safetensors")
    names = {name: _name(name, architecture) for name in tensors if name not in _SKIPPED}
    return GgufModel(config=_config(architecture, header.metadata, tensors, rope_factors), names=names)


def _name(name: str, architecture: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _BLOCK.fullmatch(name)
    table = {**_BLOCK_NAMES, **_SANDWICH_NAMES} if architecture in ("gemma2", "gemma3") else _BLOCK_NAMES
    if match is None or match["part"] not in table:
        raise _invalid(f"a tensor {name[:80]!r}", allowed=f"the tensors of {architecture}")
    return f"model.layers.{match['block']}.{table[match['part']]}.{match['kind']}"


def _config(
    architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_factors: np.ndarray[Any, Any] | None
) -> dict[str, Any]:
    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise _invalid(f"no {architecture}.{key}", allowed="the metadata of a model")
        return value

    if "token_embd.weight" not in tensors:
        raise _invalid("no token_embd.weight", allowed="a language model")
    heads, hidden_size = number("attention.head_count"), number("embedding_length")
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", hidden_size // max(1, int(heads)) if isinstance(heads, int) else 0),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in fp32
        "rope_theta": float(number("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture in ("llama", "qwen3") and "blk.0.attn_q.bias" in tensors,
        **_token_ids(metadata),
        **_windows(architecture, metadata),
    }
    if not all(isinstance(config[key], int) for key in ("num_hidden_layers", "num_key_value_heads", "intermediate_size")):
        raise _invalid("layers of different sizes", allowed="one size for all layers")
    scaling = _rope_scaling(architecture, metadata, config, rope_factors)
    return {**config, "rope_scaling": scaling} if scaling else config


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
    found = {ours: metadata.get(f"tokenizer.ggml.{theirs}") for theirs, ours in keys.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _windows(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows and soft caps. Which layers slide is the same in all models of an architecture."""
    if architecture in ("llama", "qwen2", "qwen3", "gemma"):
        return {}
    keys = {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.query_pre_attn_scalar": "query_pre_attn_scalar",
    }
    found = {ours: metadata.get(f"{architecture}.{theirs}") for theirs, ours in keys.items()}
    known = {name: value for name, value in found.items() if value is not None}
    if architecture == "gemma3":
        num_blocks = metadata.get("gemma3.block_count")
        blocks = range(num_blocks if isinstance(num_blocks, int) and 0 < num_blocks < _MAX_BLOCKS else 0)
        known["layer_types"] = ["sliding_attention" if (block + 1) % 6 else "full_attention" for block in blocks]
    if architecture == "mistral":
        return {"sliding_window": known.get("sliding_window") or None}
    if "query_pre_attn_scalar" not in known and isinstance(metadata.get(f"{architecture}.attention.key_length"), int):
        # llama.cpp keeps it only as code: the width of a head, but for the 27B models
        heads, hidden_size = metadata[f"{architecture}.attention.head_count"], metadata[f"{architecture}.embedding_length"]
        is_27b = metadata.get(f"{architecture}.block_count") == {"gemma2": 46, "gemma3": 62}[architecture]
        known["query_pre_attn_scalar"] = hidden_size // heads if is_27b else metadata[f"{architecture}.attention.key_length"]
    return known


def _rope_scaling(
    architecture: str, metadata: Mapping[str, Any], config: Mapping[str, Any], rope_factors: np.ndarray[Any, Any] | None
) -> dict[str, Any] | None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor")
    if rope_factors is not None:
        return _llama3_scaling(config, rope_factors)
    if kind == "none" or not factor:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    raise _invalid(f"rope scaling {kind!r:.40}", allowed="none, linear, yarn with its original length, or Llama 3's")


def _llama3_scaling(config: Mapping[str, Any], factors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Llama 3's scaling by the numbers that it gives; the published models differ in its factor alone."""
    factor = float(factors.max())
    theta, head_dim = config["rope_theta"], config["head_dim"]
    wavelengths = 2 * pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original, low, high = (_LLAMA3[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise _invalid("a rope_freqs.weight that is not Llama 3's scaling", allowed="its config.json beside it")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _invalid(found: str, *, allowed: str) -> InvalidModel:
    return InvalidModel(f"GGUF: {found}; allowed: {allowed}", field="weights", value=found, allowed=allowed)
