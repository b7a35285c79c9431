"""Counts a model's parameters from its config alone: for lists and limits where torch is not loaded.

A tied output projection counts once. Tests compare with the built modules of every supported type.
"""

from collections.abc import Callable, Mapping
from typing import Any

from optimizer.models.decoder.config import DECODER_TYPE


def count_parameters(model_type: str, config: dict[str, Any]) -> int:
    """Parameters of the whole model; ``config`` as validated by ``read_model_spec``."""
    count = _COUNTS.get(model_type)
    return _count_llama_like(model_type, config) if count is None else int(count(config))


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
    norms = (4 if model_type in ("gemma2", "gemma3_text") else 2) * hidden
    norms += 2 * head_dim if model_type in ("qwen3", "gemma3_text") else 0
    block = attention + _count_mlp(config) + norms
    copies = 1 if config["tie_word_embeddings"] else 2
    return int(copies * config["vocab_size"] * hidden + config["num_hidden_layers"] * block + hidden)


def _count_mlp(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    bias = config.get("mlp_bias", False)
    mlp = 2 * _linear(hidden, inner, bias=bias) + _linear(inner, hidden, bias=bias)
    num_experts = config.get("num_local_experts")
    return mlp if num_experts is None else num_experts * (mlp + hidden)


# Decoders that are not like Llama.


def _words(config: dict[str, Any], hidden: int) -> int:
    """Parameters of the embedding, and of the output projection where it is not the same."""
    return int((1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * hidden)


def _two_layer_mlp(hidden: int, inner: int, *, bias: bool = True) -> int:
    return _linear(hidden, inner, bias=bias) + _linear(inner, hidden, bias=bias)


def _count_gpt_bigcode(config: dict[str, Any]) -> int:
    hidden = config["n_embd"]
    keys = hidden // config["n_head"] if config["multi_query"] else hidden
    mlp = _two_layer_mlp(hidden, config["n_inner"] or 4 * hidden)
    block = _linear(hidden, hidden + 2 * keys) + _linear(hidden, hidden) + mlp + 4 * hidden
    return int(_words(config, hidden) + config["n_positions"] * hidden + config["n_layer"] * block + 2 * hidden)


def _count_gpt_neox(config: dict[str, Any]) -> int:
    hidden, bias = config["hidden_size"], config["attention_bias"]
    attention = _linear(hidden, 3 * hidden, bias=bias) + _linear(hidden, hidden, bias=bias)
    block = attention + _two_layer_mlp(hidden, config["intermediate_size"]) + 4 * hidden
    return int(_words(config, hidden) + config["num_hidden_layers"] * block + 2 * hidden)


def _count_phi(config: dict[str, Any]) -> int:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = hidden // num_heads
    keys = config["num_key_value_heads"] * head_dim
    block = 2 * _linear(hidden, hidden) + 2 * _linear(hidden, keys) + 2 * hidden
    block += _two_layer_mlp(hidden, config["intermediate_size"]) + (4 * head_dim if config["qk_layernorm"] else 0)
    return int(_words(config, hidden) + config["vocab_size"] + config["num_hidden_layers"] * block + 2 * hidden)


def _count_falcon(config: dict[str, Any]) -> int:
    hidden, bias = config["hidden_size"], config["bias"]
    head_dim = hidden // config["num_attention_heads"]
    if config["new_decoder_architecture"]:
        keys = config["num_kv_heads"] * head_dim
    else:
        keys = head_dim if config["multi_query"] else hidden
    num_norms = 1
    if not config["parallel_attn"] or _falcon_norms(config) == 2:
        num_norms = 2
    block = _linear(hidden, hidden + 2 * keys, bias=bias) + _linear(hidden, hidden, bias=bias)
    block += _two_layer_mlp(hidden, config["ffn_hidden_size"], bias=bias) + num_norms * 2 * hidden
    return int(_words(config, hidden) + config["num_hidden_layers"] * block + 2 * hidden)


def _falcon_norms(config: dict[str, Any]) -> int:
    default = 2 if config["new_decoder_architecture"] else 1
    return int(config["num_ln_in_parallel_attn"] or default)


def _count_stablelm(config: dict[str, Any]) -> int:
    hidden, num_heads, num_kv_heads = (
        config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim, bias = hidden // num_heads, config["use_qkv_bias"]
    block = _linear(hidden, hidden, bias=bias) + 2 * _linear(hidden, num_kv_heads * head_dim, bias=bias)
    block += hidden * hidden + 3 * hidden * config["intermediate_size"]
    block += 2 * hidden if config["use_parallel_residual"] else 4 * hidden
    block += head_dim * (num_heads + num_kv_heads) if config["qk_layernorm"] else 0
    return int(_words(config, hidden) + config["num_hidden_layers"] * block + 2 * hidden)


def _count_olmo2(config: dict[str, Any]) -> int:
    hidden = config["hidden_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    norms = hidden + keys  # of queries and keys, beside the two of the block
    return int(_count_llama_like("olmo2", config) + config["num_hidden_layers"] * norms)


def _count_qwen3_moe(config: dict[str, Any]) -> int:
    hidden, num_blocks = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config["head_dim"] or hidden // config["num_attention_heads"]
    dense = set(config["mlp_only_layers"] or ())
    step = config["decoder_sparse_step"]
    num_sparse = sum(block not in dense and (block + 1) % step == 0 for block in range(num_blocks))
    experts = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
    mlp = 3 * hidden * config["intermediate_size"]
    norms = 2 * head_dim * num_blocks
    return int(_count_llama_like("qwen3_moe", config) + num_sparse * (experts - mlp) + norms)


def _count_starcoder2(config: dict[str, Any]) -> int:
    hidden, bias = config["hidden_size"], config["use_bias"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    block = 2 * _linear(hidden, hidden, bias=bias) + 2 * _linear(hidden, keys, bias=bias) + 4 * hidden
    block += _two_layer_mlp(hidden, config["intermediate_size"], bias=bias)
    return int(_words(config, hidden) + config["num_hidden_layers"] * block + 2 * hidden)


def _count_cohere(config: dict[str, Any]) -> int:
    hidden = config["hidden_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    norms = (hidden + keys if config["use_qk_norm"] else 0) - hidden  # one norm for attention and MLP together
    return int(_count_llama_like("cohere", config) + config["num_hidden_layers"] * norms)


# Encoders, and encoders with a decoder.


def _count_bert(config: dict[str, Any]) -> int:
    """BERT's, RoBERTa's and ELECTRA's, whose embeddings may be narrower than its blocks."""
    hidden = config["hidden_size"]
    width = config.get("embedding_size", hidden)
    block = 4 * _linear(hidden, hidden) + _two_layer_mlp(hidden, config["intermediate_size"]) + 4 * hidden
    embeddings = (config["max_position_embeddings"] + config["type_vocab_size"] + 2) * width
    embeddings += _linear(width, hidden) if width != hidden else 0
    head = _linear(hidden, width) + 2 * width + config["vocab_size"]
    return int(_words(config, width) + embeddings + config["num_hidden_layers"] * block + head)


def _count_distilbert(config: dict[str, Any]) -> int:
    hidden = config["dim"]
    block = 4 * _linear(hidden, hidden) + _two_layer_mlp(hidden, config["hidden_dim"]) + 4 * hidden
    head = _linear(hidden, hidden) + 2 * hidden + config["vocab_size"]
    positions = (config["max_position_embeddings"] + 2) * hidden
    return int(_words(config, hidden) + positions + config["n_layers"] * block + head)


def _count_t5(config: dict[str, Any]) -> int:
    """Words once: transformers ties the output projection of every T5."""
    hidden, inner, num_heads = config["d_model"], config["d_ff"], config["num_heads"]
    attention = 4 * hidden * config["d_kv"] * num_heads + hidden
    is_gated = config["feed_forward_proj"].startswith("gated-")
    mlp = (3 if is_gated else 2) * hidden * inner + hidden
    stacks = config["num_layers"] * (attention + mlp) + config["num_decoder_layers"] * (2 * attention + mlp)
    biases = 2 * config["relative_attention_num_buckets"] * num_heads
    return int(config["vocab_size"] * hidden + stacks + biases + 2 * hidden)


def _count_bart(config: dict[str, Any]) -> int:
    hidden = config["d_model"]
    attention = 4 * _linear(hidden, hidden) + 2 * hidden
    encoder, decoder = (
        config[f"{stack}_layers"]
        * (num_attentions * attention + _two_layer_mlp(hidden, config[f"{stack}_ffn_dim"]) + 2 * hidden)
        for stack, num_attentions in (("encoder", 1), ("decoder", 2))
    )
    positions = 2 * (config["max_position_embeddings"] + 2) * hidden
    copies = 1 if config["tie_word_embeddings"] else 4  # shared, of each stack, and of the head
    return int(copies * config["vocab_size"] * hidden + positions + 4 * hidden + encoder + decoder)


def _linear(num_inputs: int, num_outputs: int, *, bias: bool = True) -> int:
    return num_inputs * num_outputs + (num_outputs if bias else 0)


_COUNTS: Mapping[str, Callable[[dict[str, Any]], int]] = {
    DECODER_TYPE: _count_decoder,
    "bart": _count_bart,
    "bert": _count_bert,
    "cohere": _count_cohere,
    "distilbert": _count_distilbert,
    "electra": _count_bert,
    "falcon": _count_falcon,
    "gpt2": _count_gpt2,
    "gpt_bigcode": _count_gpt_bigcode,
    "gpt_neox": _count_gpt_neox,
    "olmo2": _count_olmo2,
    "opt": _count_opt,
    "phi": _count_phi,
    "qwen3_moe": _count_qwen3_moe,
    "roberta": _count_bert,
    "stablelm": _count_stablelm,
    "starcoder2": _count_starcoder2,
    "t5": _count_t5,
}
