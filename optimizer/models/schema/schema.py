"""The allow-list behind spec.py: for each model type the config keys that are read, their ranges and defaults.

Defaults are those of the configuration classes of transformers 5.23 (a test compares them), written down here so that a
spec does not change its meaning with the installed version. Keys that size the model have no default: a config.json
that leaves one out is refused, not trained at some other size.

Left out on purpose: ``use_cache`` (never while training), ``output_*`` (change what a forward returns),
``pretraining_tp`` (read by nothing), ``layerdrop`` above 0 (blocks skipped at random cannot be planned),
``router_jitter_noise`` above 0 (written in place over a block's input, so that a recomputed block would differ).
"""

from collections.abc import Mapping
from dataclasses import replace

from optimizer.models.decoder.config import ATTENTION_KINDS, DECODER_TYPE
from optimizer.models.schema.decoders import GPT_DROPOUTS, GPT_KEYS, GPT_SIZES, MORE_DECODERS
from optimizer.models.schema.encoders import ENCODER_DECODERS, ENCODERS
from optimizer.models.schema.fields import (
    ALIASES,
    DROPOUT,
    HEAD_DIM,
    INITIALIZER_RANGE,
    LAYER_TYPE_LIST,
    MAX_POSITIONS,
    OFF,
    ON,
    REQUIRED_HEAD_DIM,
    SLIDING_WINDOW,
    SOFT_CAP,
    Architecture,
    Field,
    activation_field,
    common,
    llama_like,
    number,
    optional_int,
    size,
)

_GPT2 = Architecture(
    class_name="GPT2LMHeadModel",
    fields={
        **common(bos=50256, eos=50256, pad=None, tied=True),
        "n_positions": size(high=MAX_POSITIONS),
        **GPT_SIZES,
        "activation_function": activation_field("gelu_new"),
        **GPT_DROPOUTS,
        "layer_norm_epsilon": number(1e-5, low=1e-12, high=0.1),
        "initializer_range": INITIALIZER_RANGE,
        "scale_attn_weights": ON,
        "scale_attn_by_inverse_layer_idx": OFF,
    },
    **GPT_KEYS,
)

_OPT = Architecture(
    class_name="OPTForCausalLM",
    fields={
        **common(bos=2, eos=2, pad=1, tied=True),
        "hidden_size": size(high=65_536),
        "num_hidden_layers": size(high=512),
        "ffn_dim": size(high=1_048_576),
        "num_attention_heads": size(high=1_024),
        "max_position_embeddings": size(high=MAX_POSITIONS),
        "word_embed_proj_dim": optional_int(high=65_536),
        "activation_function": activation_field("relu"),
        "do_layer_norm_before": ON,
        "_remove_final_layer_norm": OFF,
        "dropout": replace(DROPOUT, default=0.1),
        "attention_dropout": DROPOUT,
        "layerdrop": number(0.0, low=0.0, high=0.0),
        "init_std": INITIALIZER_RANGE,
        "enable_bias": ON,
        "layer_norm_elementwise_affine": ON,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    uses_rope=False,
)

_LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    fields={
        **common(bos=1, eos=2, pad=None, tied=False),
        **llama_like(),
        "head_dim": HEAD_DIM,
        "attention_bias": OFF,
        "mlp_bias": OFF,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
)

_QWEN_WINDOW = {
    "use_sliding_window": OFF,
    "sliding_window": replace(SLIDING_WINDOW, default=4096),
    "max_window_layers": optional_int(default=28, low=0, high=512),
    "layer_types": LAYER_TYPE_LIST,
}

_QWEN2 = Architecture(
    class_name="Qwen2ForCausalLM",
    fields={**common(bos=None, eos=None, pad=None, tied=False), **llama_like(), **_QWEN_WINDOW},
    aliases=ALIASES,
    hidden_divides_by_heads=True,
)

_QWEN3 = Architecture(
    class_name="Qwen3ForCausalLM",
    fields={
        **common(bos=None, eos=None, pad=None, tied=False),
        **llama_like(),
        **_QWEN_WINDOW,
        "head_dim": REQUIRED_HEAD_DIM,
        "attention_bias": OFF,
    },
    aliases=ALIASES,
)

_MISTRAL = Architecture(
    class_name="MistralForCausalLM",
    fields={
        **common(bos=1, eos=2, pad=None, tied=False),
        **llama_like(),
        "head_dim": HEAD_DIM,
        "sliding_window": SLIDING_WINDOW,
    },
    aliases=ALIASES,
)

_GEMMA = Architecture(
    class_name="GemmaForCausalLM",
    fields={
        **common(bos=2, eos=1, pad=0, tied=True),
        **llama_like(activation="gelu_pytorch_tanh"),
        "head_dim": REQUIRED_HEAD_DIM,
        "attention_bias": OFF,
    },
    aliases={**ALIASES, "hidden_activation": "hidden_act"},
)

_GEMMA2 = Architecture(
    class_name="Gemma2ForCausalLM",
    fields={
        **common(bos=2, eos=1, pad=0, tied=True),
        **llama_like(activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        "head_dim": REQUIRED_HEAD_DIM,
        "attention_bias": OFF,
        "query_pre_attn_scalar": optional_int(default=256, high=1_048_576),
        "sliding_window": replace(SLIDING_WINDOW, default=4096),
        "layer_types": LAYER_TYPE_LIST,
        "final_logit_softcapping": replace(SOFT_CAP, default=30.0),
        "attn_logit_softcapping": replace(SOFT_CAP, default=50.0),
    },
    aliases={**ALIASES, "hidden_act": "hidden_activation"},
    hidden_divides_by_heads=True,
)

_PHI3 = Architecture(
    class_name="Phi3ForCausalLM",
    fields={
        **common(bos=1, eos=32000, pad=32000, tied=False),
        **llama_like(eps=1e-5),
        "original_max_position_embeddings": optional_int(default=4096, high=MAX_POSITIONS),
        "resid_pdrop": DROPOUT,
        "embd_pdrop": DROPOUT,
        "sliding_window": SLIDING_WINDOW,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    rope_types=("default",),
    partial_rotary=True,
)

_MIXTRAL = Architecture(
    class_name="MixtralForCausalLM",
    fields={
        **common(bos=1, eos=2, pad=None, tied=False),
        **llama_like(eps=1e-5),
        "head_dim": HEAD_DIM,
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": size(high=1_024),
        "num_experts_per_tok": size(high=1_024),
        "router_aux_loss_coef": number(0.001, high=1.0),
        "router_jitter_noise": number(0.0, high=0.0),
    },
    aliases={**ALIASES, "num_experts": "num_local_experts"},
    default_rope_theta=1_000_000.0,
)

_DECODER = Architecture(
    class_name="HeadroomDecoder",
    fields={
        **common(bos=None, eos=None, pad=None, tied=True),
        "hidden_size": size(high=65_536),
        "intermediate_size": size(high=1_048_576),
        "num_hidden_layers": size(high=512),
        "num_attention_heads": size(high=1_024),
        "num_key_value_heads": optional_int(high=1_024),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": size(high=MAX_POSITIONS),
        "activation": Field(kind="choice", default="swiglu", choices=("swiglu", "gelu")),
        "norm": Field(kind="choice", default="rms", choices=("rms", "layer")),
        "norm_place": Field(kind="choice", default="pre", choices=("pre", "post", "both")),
        "norm_eps": number(1e-6, low=1e-12, high=0.1),
        "use_bias": OFF,
        "fused_qkv": ON,
        "positions": Field(kind="choice", default="rope", choices=("rope", "learned", "none")),
        "rope_theta": number(10_000.0, low=1.0, high=1e12),
        "layer_types": Field(kind="choices", choices=ATTENTION_KINDS),
        "attention_block": optional_int(default=64, low=4, high=8_192),
        "local_window": optional_int(default=256, high=MAX_POSITIONS),
        "sparse_local_blocks": optional_int(default=4, high=1_024),
        "sparse_global_blocks": optional_int(default=1, low=0, high=1_024),
        "linear_feature_map": Field(kind="choice", default="elu", choices=("elu", "relu")),
        "sparse_embedding_gradients": OFF,
        "share_every": optional_int(default=1, high=512),
        "share_groups": Field(kind="counts", low=1, high=512),
        "dropout": DROPOUT,
        "attention_dropout": DROPOUT,
        "initializer_range": INITIALIZER_RANGE,
        "scale_residual_init": ON,
    },
    aliases=ALIASES,
    uses_rope=False,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    DECODER_TYPE: _DECODER,
    "gpt2": _GPT2,
    "opt": _OPT,
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "phi3": _PHI3,
    "mixtral": _MIXTRAL,
    **MORE_DECODERS,
    **ENCODERS,
    **ENCODER_DECODERS,
}
