"""One tiny config of each supported model type, a published-looking document each."""

from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

_WITHOUT_INNER = {
    key: value for key, value in _SHAPE.items() if key not in ("intermediate_size", "num_key_value_heads")
}

SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "headroom_decoder": {
        "model_type": "headroom_decoder",
        **_SHAPE,
        "layer_types": ["full", "local", "linear"],
        "attention_block": 8,
        "local_window": 12,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": {
        "model_type": "opt",
        "vocab_size": 128,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
    },
    "llama": {"model_type": "llama", **_SHAPE},
    "qwen2": {"model_type": "qwen2", **_SHAPE},
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 12},
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": 16},
    "gemma": {"model_type": "gemma", **_SHAPE, "head_dim": 8},
    "gemma2": {"model_type": "gemma2", **_SHAPE, "head_dim": 8, "sliding_window": 16},
    "phi3": {"model_type": "phi3", **_SHAPE},
    "mixtral": {"model_type": "mixtral", **_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"model_type": "cohere", **_SHAPE, "use_qk_norm": True},
    "falcon": {"model_type": "falcon", **_WITHOUT_INNER},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_SHAPE,
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt_bigcode": {
        "model_type": "gpt_bigcode",
        "vocab_size": 128,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_SHAPE},
    "granite": {"model_type": "granite", **_SHAPE, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "olmo2": {"model_type": "olmo2", **_SHAPE},
    "phi": {"model_type": "phi", **_SHAPE},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        "head_dim": 12,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "stablelm": {"model_type": "stablelm", **_SHAPE},
    "starcoder2": {"model_type": "starcoder2", **_SHAPE, "sliding_window": 16},
    "bert": {"model_type": "bert", **_SHAPE},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 128,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": 64,
    },
    "electra": {"model_type": "electra", **_SHAPE, "embedding_size": 16},
    "roberta": {"model_type": "roberta", **_SHAPE},
    "bart": {
        "model_type": "bart",
        "vocab_size": 128,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 64,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 128,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    },
}

PUBLISHED_TYPES = frozenset(SMALL_CONFIGS) - {"headroom_decoder"}
"""Those that transformers knows."""
