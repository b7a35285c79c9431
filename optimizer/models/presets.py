"""Well-known configurations by name, with their published values, and small models of our own for demonstrations.

Configurations only: no weights and, but for models of our own, no tokenizer. A preset is trained from random weights with the
bundled tokenizer, whose 4,096 ids fit every vocabulary here, unless the user uploads the published files.
"""

from dataclasses import dataclass
from typing import Any

from optimizer.models.spec import ModelSpec, read_model_spec


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One bundled configuration."""

    name: str
    """Name in a job spec: lower case, hyphens."""
    title: str
    """Name as people write it."""
    config: dict[str, Any]
    """config.json, the keys that matter."""
    source: str
    """Source of the values."""
    has_tokenizer: bool = False
    """The bundled tokenizer was made for it; otherwise the published one is not shipped, and the bundled one stands in."""

    @property
    def spec(self) -> ModelSpec:
        return read_model_spec(self.config)


_LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "num_key_value_heads": 8,
}
_QWEN_2_5: dict[str, Any] = {
    "model_type": "qwen2",
    "bos_token_id": 151_643,
    "eos_token_id": 151_643,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50_272,
    "max_position_embeddings": 2_048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

_TEN_MILLION: dict[str, Any] = {
    "vocab_size": 4_096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MISTRAL_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

_DECODER: dict[str, Any] = {
    "model_type": "headroom_decoder",
    **_TEN_MILLION,
    "max_position_embeddings": 8_192,
    "attention_block": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_ALL = (
    Preset(
        name="headroom-demo-10m",
        title="Headroom demo, 10 M",
        config={
            "model_type": "llama",
            **_TEN_MILLION,
            "max_position_embeddings": 1_024,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        source="this project; vocabulary of the bundled tokenizer",
        has_tokenizer=True,
    ),
    Preset(
        name="headroom-local-10m",
        title="Headroom local, 10 M",
        config={**_DECODER, "layer_types": ["local", "local", "local", "full"] * 3, "local_window": 256},
        source="this project; three local layers to a full one",
        has_tokenizer=True,
    ),
    Preset(
        name="headroom-linear-6m",
        title="Headroom linear, 6 M",
        config={**_DECODER, "layer_types": ["linear", "linear", "linear", "local"] * 3, "share_every": 2},
        source="this project; three linear layers to a local one, parameters shared by two blocks each",
        has_tokenizer=True,
    ),
    Preset(
        name="gpt2",
        title="GPT-2",
        config={
            "model_type": "gpt2",
            "vocab_size": 50_257,
            "n_positions": 1_024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
        },
        source="huggingface.co/openai-community/gpt2, config.json",
    ),
    Preset(
        name="opt-1.3b",
        title="OPT-1.3B",
        config={
            **_OPT,
            "hidden_size": 2_048,
            "ffn_dim": 8_192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2_048,
        },
        source="huggingface.co/facebook/opt-1.3b, config.json",
    ),
    Preset(
        name="opt-13b",
        title="OPT-13B",
        config={
            **_OPT,
            "hidden_size": 5_120,
            "ffn_dim": 20_480,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "word_embed_proj_dim": 5_120,
        },
        source="huggingface.co/facebook/opt-13b, config.json",
    ),
    Preset(
        name="llama-3.2-1b",
        title="Llama 3.2 1B",
        config={
            **_LLAMA_3,
            "hidden_size": 2_048,
            "intermediate_size": 8_192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8_192,
            },
        },
        source="huggingface.co/meta-llama/Llama-3.2-1B, config.json",
    ),
    Preset(
        name="llama-3-8b",
        title="Llama 3 8B",
        config={
            **_LLAMA_3,
            "hidden_size": 4_096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 8_192,
        },
        source="huggingface.co/meta-llama/Meta-Llama-3-8B, config.json",
    ),
    Preset(
        name="llama-3-70b",
        title="Llama 3 70B",
        config={
            **_LLAMA_3,
            "hidden_size": 8_192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "max_position_embeddings": 8_192,
        },
        source="huggingface.co/meta-llama/Meta-Llama-3-70B, config.json",
    ),
    Preset(
        name="qwen2.5-0.5b",
        title="Qwen2.5 0.5B",
        config={
            **_QWEN_2_5,
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4_864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "max_window_layers": 24,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
        },
        source="huggingface.co/Qwen/Qwen2.5-0.5B, config.json",
    ),
    Preset(
        name="qwen2.5-7b",
        title="Qwen2.5 7B",
        config={
            **_QWEN_2_5,
            "vocab_size": 152_064,
            "hidden_size": 3_584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "max_window_layers": 28,
            "sliding_window": 131_072,
            "tie_word_embeddings": False,
        },
        source="huggingface.co/Qwen/Qwen2.5-7B, config.json",
    ),
    Preset(
        name="mistral-7b",
        title="Mistral 7B v0.1",
        config={
            "model_type": "mistral",
            **_MISTRAL_SIZES,
            "max_position_embeddings": 32_768,
            "sliding_window": 4_096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        source="huggingface.co/mistralai/Mistral-7B-v0.1, config.json",
    ),
    Preset(
        name="gemma-2-2b",
        title="Gemma 2 2B",
        config={
            "model_type": "gemma2",
            "vocab_size": 256_000,
            "hidden_size": 2_304,
            "intermediate_size": 9_216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8_192,
            "sliding_window": 4_096,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        source="huggingface.co/google/gemma-2-2b, config.json",
    ),
    Preset(
        name="phi-3-mini",
        title="Phi-3 mini 4k",
        config={
            "model_type": "phi3",
            "vocab_size": 32_064,
            "hidden_size": 3_072,
            "intermediate_size": 8_192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4_096,
            "original_max_position_embeddings": 4_096,
            "sliding_window": 2_047,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "bos_token_id": 1,
            "eos_token_id": 32_000,
            "pad_token_id": 32_000,
        },
        source="huggingface.co/microsoft/Phi-3-mini-4k-instruct, config.json",
    ),
    Preset(
        name="mixtral-8x7b",
        title="Mixtral 8x7B v0.1",
        config={
            "model_type": "mixtral",
            **_MISTRAL_SIZES,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.02,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        source="huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
