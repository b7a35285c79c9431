"""How many parameters a model has, from its config alone: for lists and limits where torch is not loaded.

A tied output projection counts once. Tests compare with the built modules of every supported type.
"""

from typing import Any

from optimizer.models.decoder.config import DECODER_TYPE


def count_parameters(model_type: str, config: dict[str, Any]) -> int:
    """Parameters of the whole model; ``config`` as validated by ``read_model_spec``."""
    if model_type == "gpt2":
        return _count_gpt2(config)
    if model_type == "opt":
        return _count_opt(config)
    if model_type == DECODER_TYPE:
        return _count_decoder(config)
    return _count_llama_like(model_type, config)


def _count_gpt2(config: dict[str, Any]) -> int:
    hidden = config["n_embd"]
    inner = config["n_inner"] or 4 * hidden
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block = attention + _linear(hidden, inner) + _linear(inner, hidden) + 4 * hidden
    head = 0 if config["tie_word_embeddings"] else config["vocab_size"] * hidden
    embeddings = (config["vocab_size"] + config["n_positions"]) * hidden
    return int(embeddings + config["n_layer"] * block + 2 * hidden + head)


def _count_opt(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    bias = config["enable_bias"]
    norm = 2 * hidden if config["layer_norm_elementwise_affine"] else 0
    block = 4 * _linear(hidden, hidden, bias=bias) + 2 * norm
    block += _linear(hidden, inner, bias=bias) + _linear(inner, hidden, bias=bias)
    width = config["word_embed_proj_dim"] or hidden
    words = config["vocab_size"] * width
    projections = 2 * width * hidden if width != hidden else 0
    positions = (config["max_position_embeddings"] + 2) * hidden
    has_final_norm = config["do_layer_norm_before"] and not config["_remove_final_layer_norm"]
    copies = 1 if config["tie_word_embeddings"] else 2
    total = copies * words + projections + positions + config["num_hidden_layers"] * block
    return int(total + (norm if has_final_norm else 0))


def _count_decoder(config: dict[str, Any]) -> int:
    """Blocks that share parameters count once."""
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"], config["use_bias"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = _linear(hidden, queries + 2 * keys, bias=bias) + _linear(queries, hidden, bias=bias)
    num_inner = 2 if config["activation"] == "swiglu" else 1
    mlp = num_inner * _linear(hidden, inner, bias=bias) + _linear(inner, hidden, bias=bias)
    norm = 2 * hidden if config["norm"] == "layer" and bias else hidden
    block = attention + mlp + norm * (4 if config["norm_place"] == "both" else 2)
    words = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * hidden
    positions = config["max_position_embeddings"] * hidden if config["positions"] == "learned" else 0
    return int(words + positions + len(config["share_groups"]) * block + norm)


def _count_llama_like(model_type: str, config: dict[str, Any]) -> int:
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    bias = config.get("attention_bias", False)
    attention = _linear(hidden, queries, bias=bias or model_type == "qwen2")
    attention += 2 * _linear(hidden, keys, bias=bias or model_type == "qwen2")
    attention += _linear(queries, hidden, bias=bias)
    norms = (4 if model_type == "gemma2" else 2) * hidden + (2 * head_dim if model_type == "qwen3" else 0)
    block = attention + _count_mlp(config) + norms
    copies = 1 if config["tie_word_embeddings"] else 2
    return int(copies * config["vocab_size"] * hidden + config["num_hidden_layers"] * block + hidden)


def _count_mlp(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    bias = config.get("mlp_bias", False)
    mlp = 2 * _linear(hidden, inner, bias=bias) + _linear(inner, hidden, bias=bias)
    num_experts = config.get("num_local_experts")
    return mlp if num_experts is None else num_experts * (mlp + hidden)


def _linear(num_inputs: int, num_outputs: int, *, bias: bool = True) -> int:
    return num_inputs * num_outputs + (num_outputs if bias else 0)
