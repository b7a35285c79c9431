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
}

PUBLISHED_TYPES = frozenset(SMALL_CONFIGS) - {"headroom_decoder"}
"""Those that transformers knows."""
