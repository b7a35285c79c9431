"""A model's sizes as GGUF's metadata. Torch-free.

Keys as ``convert_hf_to_gguf.py`` writes them. Llama 3's rotary scaling is no key but a tensor of factors.
"""

import math
from typing import Any

import numpy as np

from optimizer.models.files.gguf_export.kinds import GgufPacking, head_dim, rope_base, rope_of
from optimizer.models.spec import ModelSpec

_FILE_TYPES: dict[GgufPacking, int] = {"f16": 1, "q8_0": 7}
"""``LlamaFileType``: mostly F16, mostly Q8_0."""


def add_hyperparameters(writer: Any, spec: ModelSpec, *, name: str, packing: GgufPacking, architecture: str) -> None:
    """writer: the gguf package's, before its file is open."""
    config = spec.config
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[packing])
    if packing == "q8_0":
        writer.add_quantization_version(2)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(rope_base(config))
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim(config))
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _add_rope_scaling(writer, rope_of(config))


def rope_factors(spec: ModelSpec) -> np.ndarray[Any, Any] | None:
    """By how much each rotary frequency is divided, under Llama 3's scaling; None under any other."""
    rope = rope_of(spec.config)
    if rope.get("rope_type") != "llama3":
        return None
    width = head_dim(spec.config)
    frequencies = 1.0 / rope_base(spec.config) ** (np.arange(0, width, 2, dtype=np.float64) / width)
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _add_rope_scaling(writer: Any, rope: Any) -> None:
    from gguf import RopeScalingType

    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
