"""The allow-list's decoders that differ from Llama in more than a number: attention and MLP side by side, norms of layer kind,
biases, one head of keys and values for all, experts. See schema.py, which says where defaults come from and what is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from optimizer.models.schema.fields import (
    ALIASES,
    DROPOUT,
    HEAD_DIM,
    INITIALIZER_RANGE,
    LAYER_TYPE_LIST,
    MAX_POSITIONS,
    OFF,
    ON,
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

_SIZES = {
    "hidden_size": size(high=65_536),
    "num_hidden_layers": size(high=512),
    "num_attention_heads": size(high=1_024),
    "max_position_embeddings": size(high=MAX_POSITIONS),
}
_INNER_SIZE = size(high=1_048_576)
_EPS = number(1e-5, low=1e-12, high=0.1)
_MULTIPLIER = number(1.0, low=1e-6, high=1e6)
_NOT_YET = Field(kind="bool", default=False, only=False)

GPT_SIZES: Final = {
    "n_embd": size(high=65_536),
    "n_layer": size(high=512),
    "n_head": size(high=1_024),
    "n_inner": optional_int(high=1_048_576),
}
GPT_DROPOUTS: Final = {
    "resid_pdrop": replace(DROPOUT, default=0.1),
    "embd_pdrop": replace(DROPOUT, default=0.1),
    "attn_pdrop": replace(DROPOUT, default=0.1),
}
GPT_KEYS: Final[dict[str, Any]] = {
    "aliases": {
        **ALIASES,
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "hidden_size_key": "n_embd",
    "num_blocks_key": "n_layer",
    "num_heads_key": "n_head",
    "max_positions_key": "n_positions",
    "hidden_divides_by_heads": True,
    "uses_rope": False,
}
"""Names of GPT-2's keys, which models made after it share."""

_GPT_NEOX = Architecture(
    class_name="GPTNeoXForCausalLM",
    fields={
        **common(bos=0, eos=2, pad=None, tied=False),
        **_SIZES,
        "intermediate_size": _INNER_SIZE,
        "hidden_act": activation_field("gelu"),
        "attention_dropout": DROPOUT,
        "hidden_dropout": DROPOUT,
        "initializer_range": INITIALIZER_RANGE,
        "layer_norm_eps": _EPS,
        "use_parallel_residual": ON,
        "attention_bias": ON,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    partial_rotary=True,
    default_partial_rotary=0.25,
    rope_aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
)

_PHI = Architecture(
    class_name="PhiForCausalLM",
    fields={
        **common(bos=1, eos=2, pad=None, tied=False),
        **_SIZES,
        "intermediate_size": _INNER_SIZE,
        "num_key_value_heads": optional_int(high=1_024),
        "resid_pdrop": DROPOUT,
        "embd_pdrop": DROPOUT,
        "attention_dropout": DROPOUT,
        "hidden_act": activation_field("gelu_new"),
        "initializer_range": INITIALIZER_RANGE,
        "layer_norm_eps": _EPS,
        "qk_layernorm": OFF,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    partial_rotary=True,
    default_partial_rotary=0.5,
)

_FALCON = Architecture(
    class_name="FalconForCausalLM",
    fields={
        **common(bos=11, eos=11, pad=None, tied=True),
        **_SIZES,
        "max_position_embeddings": optional_int(default=2048, high=MAX_POSITIONS),
        "num_kv_heads": optional_int(high=1_024),
        "num_ln_in_parallel_attn": optional_int(low=1, high=2),
        "ffn_hidden_size": optional_int(high=1_048_576),
        "activation": activation_field("gelu"),
        "layer_norm_epsilon": _EPS,
        "initializer_range": INITIALIZER_RANGE,
        "hidden_dropout": DROPOUT,
        "attention_dropout": DROPOUT,
        "alibi": _NOT_YET,
        "new_decoder_architecture": OFF,
        "multi_query": ON,
        "parallel_attn": ON,
        "bias": OFF,
    },
    aliases={
        **ALIASES,
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    },
    hidden_divides_by_heads=True,
)

_STABLELM = Architecture(
    class_name="StableLmForCausalLM",
    fields={
        **common(bos=0, eos=0, pad=None, tied=False),
        **_SIZES,
        "intermediate_size": _INNER_SIZE,
        "num_key_value_heads": optional_int(high=1_024),
        "hidden_act": activation_field("silu"),
        "initializer_range": INITIALIZER_RANGE,
        "layer_norm_eps": _EPS,
        "use_qkv_bias": OFF,
        "qk_layernorm": OFF,
        "use_parallel_residual": OFF,
        "hidden_dropout": DROPOUT,
        "attention_dropout": DROPOUT,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    partial_rotary=True,
    default_partial_rotary=0.25,
)

_OLMO2 = Architecture(
    class_name="Olmo2ForCausalLM",
    fields={
        **common(bos=None, eos=50279, pad=1, tied=False),
        **llama_like(eps=1e-5),
        "attention_bias": OFF,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
)

_GEMMA3 = Architecture(
    class_name="Gemma3ForCausalLM",
    fields={
        **common(bos=2, eos=1, pad=0, tied=True),
        **llama_like(activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        "head_dim": replace(HEAD_DIM, default=256),
        "attention_bias": OFF,
        "query_pre_attn_scalar": optional_int(default=256, high=1_048_576),
        "sliding_window": replace(SLIDING_WINDOW, default=4096),
        "sliding_window_pattern": optional_int(high=512),
        "layer_types": LAYER_TYPE_LIST,
        "final_logit_softcapping": SOFT_CAP,
        "use_bidirectional_attention": _NOT_YET,
    },
    aliases={**ALIASES, "hidden_act": "hidden_activation"},
    hidden_divides_by_heads=True,
    default_rope_theta=1_000_000.0,
    rope_by_layer_type=True,
)

_QWEN3_MOE = Architecture(
    class_name="Qwen3MoeForCausalLM",
    fields={
        **common(bos=None, eos=None, pad=None, tied=False),
        **llama_like(),
        "head_dim": HEAD_DIM,
        "attention_bias": OFF,
        "use_sliding_window": OFF,
        "sliding_window": replace(SLIDING_WINDOW, default=4096),
        "decoder_sparse_step": optional_int(default=1, high=512),
        "moe_intermediate_size": _INNER_SIZE,
        "num_experts": size(high=1_024),
        "num_experts_per_tok": size(high=1_024),
        "norm_topk_prob": OFF,
        "router_aux_loss_coef": number(0.001, high=1.0),
        "mlp_only_layers": Field(kind="counts", default=[], low=0, high=511, may_be_empty=True),
    },
    aliases={**ALIASES, "num_local_experts": "num_experts"},
    num_experts_key="num_experts",
)

_GRANITE = Architecture(
    class_name="GraniteForCausalLM",
    fields={
        **common(bos=1, eos=2, pad=None, tied=False),
        **llama_like(),
        "attention_bias": OFF,
        "mlp_bias": OFF,
        "embedding_multiplier": _MULTIPLIER,
        "logits_scaling": _MULTIPLIER,
        "residual_multiplier": _MULTIPLIER,
        "attention_multiplier": _MULTIPLIER,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
)

_STARCODER2 = Architecture(
    class_name="Starcoder2ForCausalLM",
    fields={
        **common(bos=50256, eos=50256, pad=None, tied=True),
        **_SIZES,
        "intermediate_size": _INNER_SIZE,
        "num_key_value_heads": optional_int(default=2, high=1_024),
        "hidden_act": activation_field("gelu_pytorch_tanh"),
        "initializer_range": replace(INITIALIZER_RANGE, default=0.018042),
        "norm_epsilon": _EPS,
        "sliding_window": SLIDING_WINDOW,
        "attention_dropout": DROPOUT,
        "residual_dropout": DROPOUT,
        "embedding_dropout": DROPOUT,
        "use_bias": ON,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
)

_COHERE = Architecture(
    class_name="CohereForCausalLM",
    fields={
        **common(bos=5, eos=255001, pad=0, tied=True),
        **_SIZES,
        "intermediate_size": _INNER_SIZE,
        "num_key_value_heads": optional_int(high=1_024),
        "logit_scale": number(0.0625, low=1e-6, high=1e6),
        "hidden_act": activation_field("silu"),
        "initializer_range": INITIALIZER_RANGE,
        "layer_norm_eps": _EPS,
        "attention_bias": OFF,
        "attention_dropout": DROPOUT,
        "use_qk_norm": OFF,
    },
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    default_rope_theta=500_000.0,
)

_GPT_BIGCODE = Architecture(
    class_name="GPTBigCodeForCausalLM",
    fields={
        **common(bos=50256, eos=50256, pad=None, tied=True),
        "n_positions": size(high=65_536),
        **GPT_SIZES,
        "activation_function": activation_field("gelu_pytorch_tanh"),
        **GPT_DROPOUTS,
        "layer_norm_epsilon": _EPS,
        "initializer_range": INITIALIZER_RANGE,
        "scale_attn_weights": ON,
        "multi_query": ON,
    },
    **GPT_KEYS,
)

MORE_DECODERS: Mapping[str, Architecture] = {
    "cohere": _COHERE,
    "falcon": _FALCON,
    "gemma3_text": _GEMMA3,
    "gpt_bigcode": _GPT_BIGCODE,
    "gpt_neox": _GPT_NEOX,
    "granite": _GRANITE,
    "olmo2": _OLMO2,
    "phi": _PHI,
    "qwen3_moe": _QWEN3_MOE,
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
}
