"""The parts of an allow-list of config keys: a key with its range and default (``Field``), a model type with its keys
(``Architecture``), and the keys that many model types share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]
Kind = Literal["int", "float", "bool", "choice", "tokens", "choices", "counts"]

ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish")
ModelKind = Literal["decoder", "encoder", "encoder_decoder"]
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
    only: bool | None = None
    """The one value of a bool that is supported."""
    may_be_empty: bool = False
    """True if a list of counts may be empty."""

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.nullable
        if self.kind == "bool":
            return isinstance(value, bool) and self.only in (None, value)
        if self.kind == "choice":
            return isinstance(value, str) and value in self.choices
        if self.kind == "choices":
            return isinstance(value, list) and all(isinstance(item, str) and item in self.choices for item in value)
        if self.kind == "counts":
            is_list = isinstance(value, list) and (len(value) > 0 or self.may_be_empty) and len(value) <= 512
            return is_list and all(map(self._is_int_in_range, value))
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
        """The allowed values, in words."""
        if self.kind == "bool":
            return "true or false" if self.only is None else str(self.only).lower()
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
    kind: ModelKind = "decoder"
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key, each to the listed name."""
    hidden_size_key: str = "hidden_size"
    num_blocks_key: str = "num_hidden_layers"
    num_decoder_blocks_key: str | None = None
    """Key of the decoder's depth, where the encoder's is ``num_blocks_key``."""
    num_heads_key: str = "num_attention_heads"
    more_heads_keys: Sequence[str] = ()
    """Other numbers of heads that divide the hidden size."""
    num_experts_key: str = "num_local_experts"
    max_positions_key: str | None = "max_position_embeddings"
    """None: positions are relative and have no end."""
    positions_follow_padding: bool = False
    """Positions are counted from ``pad_token_id`` + 1, so that many fewer tokens fit (RoBERTa)."""
    hidden_divides_by_heads: bool = False
    """The hidden size must be a multiple of the number of heads even where head_dim is given."""
    uses_rope: bool = True
    rope_types: Sequence[RopeType] = ("default", "linear", "llama3", "yarn")
    default_rope_theta: float = 10_000.0
    partial_rotary: bool = False
    default_partial_rotary: float = 1.0
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Old names of the rotary keys, each to the key of ``rope_parameters``."""
    rope_by_layer_type: bool = False
    """``rope_parameters`` holds one object for each layer type (Gemma 3)."""


def size(*, high: int) -> Field:
    return Field(kind="int", required=True, low=1, high=high)


def optional_int(*, default: int | None = None, low: int = 1, high: int) -> Field:
    return Field(kind="int", default=default, low=low, high=high)


def number(default: float | None, *, low: float = 0.0, high: float) -> Field:
    return Field(kind="float", default=default, low=low, high=high)


def token(default: int | None) -> Field:
    return Field(kind="int", default=default, nullable=True, low=0, high=MAX_VOCAB_SIZE - 1)


def tokens(default: int | None) -> Field:
    return Field(kind="tokens", default=default, nullable=True, low=0, high=MAX_VOCAB_SIZE - 1)


def activation_field(default: str) -> Field:
    return Field(kind="choice", default=default, choices=ACTIVATIONS)


ON = Field(kind="bool", default=True)
OFF = Field(kind="bool", default=False)
DROPOUT = number(0.0, high=0.9)
INITIALIZER_RANGE = number(0.02, high=1.0)
SOFT_CAP = Field(kind="float", nullable=True, low=0.01, high=1e6)
SLIDING_WINDOW = optional_int(high=MAX_POSITIONS)
LAYER_TYPE_LIST = Field(kind="choices", choices=LAYER_TYPES)
DTYPE = Field(kind="choice", choices=DTYPES)
ALIASES = {"torch_dtype": "dtype"}


def common(*, bos: int | None, eos: int | None, pad: int | None, tied: bool) -> dict[str, Field]:
    return {
        "vocab_size": Field(kind="int", required=True, low=2, high=MAX_VOCAB_SIZE),
        "bos_token_id": token(bos),
        "eos_token_id": tokens(eos),
        "pad_token_id": token(pad),
        "tie_word_embeddings": replace(OFF, default=tied),
        "dtype": DTYPE,
    }


def llama_like(*, activation_key: str = "hidden_act", activation: str = "silu", eps: float = 1e-6) -> dict[str, Field]:
    """The keys that all architectures with rotary embeddings and a gated MLP share."""
    return {
        "hidden_size": size(high=65_536),
        "intermediate_size": size(high=1_048_576),
        "num_hidden_layers": size(high=512),
        "num_attention_heads": size(high=1_024),
        "num_key_value_heads": optional_int(high=1_024),
        activation_key: activation_field(activation),
        "max_position_embeddings": size(high=MAX_POSITIONS),
        "initializer_range": INITIALIZER_RANGE,
        "rms_norm_eps": number(eps, low=1e-12, high=0.1),
        "attention_dropout": DROPOUT,
    }


HEAD_DIM = optional_int(high=1_024)
REQUIRED_HEAD_DIM = replace(HEAD_DIM, required=True)
