"""The allow-list behind spec.py: for each model type the config keys that are read, their ranges and defaults.

Defaults are those of the configuration classes of transformers 5.23 (a test compares them), written down here so that a
spec does not change its meaning with the installed version. Keys that size the model have no default: a config.json
that leaves one out is refused, not trained at some other size.

Left out on purpose: ``use_cache`` (never while training), ``output_*`` (change what a forward returns),
``pretraining_tp`` (read by nothing), ``layerdrop`` above 0 (blocks skipped at random cannot be planned),
``router_jitter_noise`` above 0 (written in place over a block's input, so that a recomputed block would differ).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from optimizer.models.decoder.config import ATTENTION_KINDS, DECODER_TYPE
from optimizer.models.rope import RopeType

Kind = Literal["int", "float", "bool", "choice", "tokens", "choices", "counts"]

ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish")
DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_VOCAB_SIZE = 1_048_576
MAX_POSITIONS = 16_777_216


@dataclass(frozen=True, kw_only=True)
class Field:
    """One allow-listed key. ``default`` counts only where ``required`` is false; None there means "may be absent"."""

    kind: Kind
    default: Any = None
    required: bool = False
    nullable: bool = False
    """null is a value of its own, not the default."""
    low: float = 0
    high: float = 0
    choices: Sequence[str] = ()

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.nullable
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "choice":
            return isinstance(value, str) and value in self.choices
        if self.kind == "choices":
            return isinstance(value, list) and all(isinstance(item, str) and item in self.choices for item in value)
        if self.kind == "counts":
            return isinstance(value, list) and 0 < len(value) <= 512 and all(map(self._is_int_in_range, value))
        if self.kind == "tokens" and isinstance(value, list):
            return 0 < len(value) <= 64 and all(self._is_int_in_range(item) for item in value)
        if self.kind == "float":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and self.low <= value <= self.high  # also refuses NaN, which compares false
        return self._is_int_in_range(value)

    def normalized(self, value: Any) -> Any:
        return float(value) if self.kind == "float" and value is not None else value

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "choice":
            return ", ".join(self.choices)
        if self.kind == "choices":
            return f"a list of {', '.join(self.choices)}"
        if self.kind == "counts":
            return f"a list of at most 512 integers, each {int(self.low):,} to {int(self.high):,}"
        if self.kind == "tokens":
            return f"a token id, or a list of 1 to 64, each 0 to {int(self.high):,}"
        noun = "an integer from" if self.kind == "int" else "a number from"
        return f"{noun} {self.low:,} to {self.high:,}"

    def _is_int_in_range(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model type: its class in transformers, its keys, and which key means what."""

    class_name: str
    fields: Mapping[str, Field]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key, each to the listed name."""
    hidden_size_key: str = "hidden_size"
    num_blocks_key: str = "num_hidden_layers"
    num_heads_key: str = "num_attention_heads"
    max_positions_key: str = "max_position_embeddings"
    hidden_divides_by_heads: bool = False
    """The hidden size must be a multiple of the number of heads even where head_dim is given."""
    uses_rope: bool = True
    rope_types: Sequence[RopeType] = ("default", "linear", "llama3", "yarn")
    default_rope_theta: float = 10_000.0
    partial_rotary: bool = False


def _size(*, high: int) -> Field:
    return Field(kind="int", required=True, low=1, high=high)


def _optional_int(*, default: int | None = None, low: int = 1, high: int) -> Field:
    return Field(kind="int", default=default, low=low, high=high)


def _number(default: float | None, *, low: float = 0.0, high: float) -> Field:
    return Field(kind="float", default=default, low=low, high=high)


def _token(default: int | None) -> Field:
    return Field(kind="int", default=default, nullable=True, low=0, high=MAX_VOCAB_SIZE - 1)


def _tokens(default: int | None) -> Field:
    return Field(kind="tokens", default=default, nullable=True, low=0, high=MAX_VOCAB_SIZE - 1)


def _activation(default: str) -> Field:
    return Field(kind="choice", default=default, choices=ACTIVATIONS)


_ON = Field(kind="bool", default=True)
_OFF = Field(kind="bool", default=False)
_DROPOUT = _number(0.0, high=0.9)
_INITIALIZER_RANGE = _number(0.02, high=1.0)
_SOFT_CAP = Field(kind="float", nullable=True, low=0.01, high=1e6)
_SLIDING_WINDOW = _optional_int(high=MAX_POSITIONS)
_LAYER_TYPES = Field(kind="choices", choices=LAYER_TYPES)
_DTYPE = Field(kind="choice", choices=DTYPES)
_ALIASES = {"torch_dtype": "dtype"}


def _common(*, bos: int | None, eos: int | None, pad: int | None, tied: bool) -> dict[str, Field]:
    return {
        "vocab_size": Field(kind="int", required=True, low=2, high=MAX_VOCAB_SIZE),
        "bos_token_id": _token(bos),
        "eos_token_id": _tokens(eos),
        "pad_token_id": _token(pad),
        "tie_word_embeddings": replace(_OFF, default=tied),
        "dtype": _DTYPE,
    }


def _llama_like(*, activation_key: str = "hidden_act", activation: str = "silu", eps: float = 1e-6) -> dict[str, Field]:
    """The keys that all architectures with rotary embeddings and a gated MLP share."""
    return {
        "hidden_size": _size(high=65_536),
        "intermediate_size": _size(high=1_048_576),
        "num_hidden_layers": _size(high=512),
        "num_attention_heads": _size(high=1_024),
        "num_key_value_heads": _optional_int(high=1_024),
        activation_key: _activation(activation),
        "max_position_embeddings": _size(high=MAX_POSITIONS),
        "initializer_range": _INITIALIZER_RANGE,
        "rms_norm_eps": _number(eps, low=1e-12, high=0.1),
        "attention_dropout": _DROPOUT,
    }


_HEAD_DIM = _optional_int(high=1_024)
_REQUIRED_HEAD_DIM = replace(_HEAD_DIM, required=True)

_GPT2 = Architecture(
    class_name="GPT2LMHeadModel",
    fields={
        **_common(bos=50256, eos=50256, pad=None, tied=True),
        "n_positions": _size(high=MAX_POSITIONS),
        "n_embd": _size(high=65_536),
        "n_layer": _size(high=512),
        "n_head": _size(high=1_024),
        "n_inner": _optional_int(high=1_048_576),
        "activation_function": _activation("gelu_new"),
        "resid_pdrop": replace(_DROPOUT, default=0.1),
        "embd_pdrop": replace(_DROPOUT, default=0.1),
        "attn_pdrop": replace(_DROPOUT, default=0.1),
        "layer_norm_epsilon": _number(1e-5, low=1e-12, high=0.1),
        "initializer_range": _INITIALIZER_RANGE,
        "scale_attn_weights": _ON,
        "scale_attn_by_inverse_layer_idx": _OFF,
    },
    aliases={
        **_ALIASES,
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    hidden_size_key="n_embd",
    num_blocks_key="n_layer",
    num_heads_key="n_head",
    max_positions_key="n_positions",
    hidden_divides_by_heads=True,
    uses_rope=False,
)

_OPT = Architecture(
    class_name="OPTForCausalLM",
    fields={
        **_common(bos=2, eos=2, pad=1, tied=True),
        "hidden_size": _size(high=65_536),
        "num_hidden_layers": _size(high=512),
        "ffn_dim": _size(high=1_048_576),
        "num_attention_heads": _size(high=1_024),
        "max_position_embeddings": _size(high=MAX_POSITIONS),
        "word_embed_proj_dim": _optional_int(high=65_536),
        "activation_function": _activation("relu"),
        "do_layer_norm_before": _ON,
        "_remove_final_layer_norm": _OFF,
        "dropout": replace(_DROPOUT, default=0.1),
        "attention_dropout": _DROPOUT,
        "layerdrop": _number(0.0, low=0.0, high=0.0),
        "init_std": _INITIALIZER_RANGE,
        "enable_bias": _ON,
        "layer_norm_elementwise_affine": _ON,
    },
    aliases=_ALIASES,
    hidden_divides_by_heads=True,
    uses_rope=False,
)

_LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    fields={
        **_common(bos=1, eos=2, pad=None, tied=False),
        **_llama_like(),
        "head_dim": _HEAD_DIM,
        "attention_bias": _OFF,
        "mlp_bias": _OFF,
    },
    aliases=_ALIASES,
    hidden_divides_by_heads=True,
)

_QWEN_WINDOW = {
    "use_sliding_window": _OFF,
    "sliding_window": replace(_SLIDING_WINDOW, default=4096),
    "max_window_layers": _optional_int(default=28, low=0, high=512),
    "layer_types": _LAYER_TYPES,
}

_QWEN2 = Architecture(
    class_name="Qwen2ForCausalLM",
    fields={**_common(bos=None, eos=None, pad=None, tied=False), **_llama_like(), **_QWEN_WINDOW},
    aliases=_ALIASES,
    hidden_divides_by_heads=True,
)

_QWEN3 = Architecture(
    class_name="Qwen3ForCausalLM",
    fields={
        **_common(bos=None, eos=None, pad=None, tied=False),
        **_llama_like(),
        **_QWEN_WINDOW,
        "head_dim": _REQUIRED_HEAD_DIM,
        "attention_bias": _OFF,
    },
    aliases=_ALIASES,
)

_MISTRAL = Architecture(
    class_name="MistralForCausalLM",
    fields={
        **_common(bos=1, eos=2, pad=None, tied=False),
        **_llama_like(),
        "head_dim": _HEAD_DIM,
        "sliding_window": _SLIDING_WINDOW,
    },
    aliases=_ALIASES,
)

_GEMMA = Architecture(
    class_name="GemmaForCausalLM",
    fields={
        **_common(bos=2, eos=1, pad=0, tied=True),
        **_llama_like(activation="gelu_pytorch_tanh"),
        "head_dim": _REQUIRED_HEAD_DIM,
        "attention_bias": _OFF,
    },
    aliases={**_ALIASES, "hidden_activation": "hidden_act"},
)

_GEMMA2 = Architecture(
    class_name="Gemma2ForCausalLM",
    fields={
        **_common(bos=2, eos=1, pad=0, tied=True),
        **_llama_like(activation_key="hidden_activation", activation="gelu_pytorch_tanh"),
        "head_dim": _REQUIRED_HEAD_DIM,
        "attention_bias": _OFF,
        "query_pre_attn_scalar": _optional_int(default=256, high=1_048_576),
        "sliding_window": replace(_SLIDING_WINDOW, default=4096),
        "layer_types": _LAYER_TYPES,
        "final_logit_softcapping": replace(_SOFT_CAP, default=30.0),
        "attn_logit_softcapping": replace(_SOFT_CAP, default=50.0),
    },
    aliases={**_ALIASES, "hidden_act": "hidden_activation"},
    hidden_divides_by_heads=True,
)

_PHI3 = Architecture(
    class_name="Phi3ForCausalLM",
    fields={
        **_common(bos=1, eos=32000, pad=32000, tied=False),
        **_llama_like(eps=1e-5),
        "original_max_position_embeddings": _optional_int(default=4096, high=MAX_POSITIONS),
        "resid_pdrop": _DROPOUT,
        "embd_pdrop": _DROPOUT,
        "sliding_window": _SLIDING_WINDOW,
    },
    aliases=_ALIASES,
    hidden_divides_by_heads=True,
    rope_types=("default",),
    partial_rotary=True,
)

_MIXTRAL = Architecture(
    class_name="MixtralForCausalLM",
    fields={
        **_common(bos=1, eos=2, pad=None, tied=False),
        **_llama_like(eps=1e-5),
        "head_dim": _HEAD_DIM,
        "sliding_window": _SLIDING_WINDOW,
        "num_local_experts": _size(high=1_024),
        "num_experts_per_tok": _size(high=1_024),
        "router_aux_loss_coef": _number(0.001, high=1.0),
        "router_jitter_noise": _number(0.0, high=0.0),
    },
    aliases={**_ALIASES, "num_experts": "num_local_experts"},
    default_rope_theta=1_000_000.0,
)

_DECODER = Architecture(
    class_name="HeadroomDecoder",
    fields={
        **_common(bos=None, eos=None, pad=None, tied=True),
        "hidden_size": _size(high=65_536),
        "intermediate_size": _size(high=1_048_576),
        "num_hidden_layers": _size(high=512),
        "num_attention_heads": _size(high=1_024),
        "num_key_value_heads": _optional_int(high=1_024),
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": _size(high=MAX_POSITIONS),
        "activation": Field(kind="choice", default="swiglu", choices=("swiglu", "gelu")),
        "norm": Field(kind="choice", default="rms", choices=("rms", "layer")),
        "norm_place": Field(kind="choice", default="pre", choices=("pre", "post", "both")),
        "norm_eps": _number(1e-6, low=1e-12, high=0.1),
        "use_bias": _OFF,
        "fused_qkv": _ON,
        "positions": Field(kind="choice", default="rope", choices=("rope", "learned", "none")),
        "rope_theta": _number(10_000.0, low=1.0, high=1e12),
        "layer_types": Field(kind="choices", choices=ATTENTION_KINDS),
        "attention_block": _optional_int(default=64, low=4, high=8_192),
        "local_window": _optional_int(default=256, high=MAX_POSITIONS),
        "sparse_local_blocks": _optional_int(default=4, high=1_024),
        "sparse_global_blocks": _optional_int(default=1, low=0, high=1_024),
        "linear_feature_map": Field(kind="choice", default="elu", choices=("elu", "relu")),
        "sparse_embedding_gradients": _OFF,
        "share_every": _optional_int(default=1, high=512),
        "share_groups": Field(kind="counts", low=1, high=512),
        "dropout": _DROPOUT,
        "attention_dropout": _DROPOUT,
        "initializer_range": _INITIALIZER_RANGE,
        "scale_residual_init": _ON,
    },
    aliases=_ALIASES,
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
}
