"""The allow-list's encoders, trained on masked tokens, and encoders with a decoder. See schema.py, which says where defaults
come from and what is left out.
"""

from collections.abc import Mapping
from dataclasses import replace

from optimizer.models.schema.fields import (
    ALIASES,
    DROPOUT,
    INITIALIZER_RANGE,
    MAX_POSITIONS,
    OFF,
    Architecture,
    Field,
    activation_field,
    common,
    number,
    optional_int,
    size,
    token,
)

_INNER_SIZE = size(high=1_048_576)
_SOME_DROPOUT = replace(DROPOUT, default=0.1)
_NO_LAYER_DROP = number(0.0, high=0.0)
_MAX_POSITIONS = size(high=MAX_POSITIONS)


def _bert_like(*, bos: int | None, eos: int | None, pad: int) -> dict[str, Field]:
    return {
        **common(bos=bos, eos=eos, pad=pad, tied=True),
        "hidden_size": size(high=65_536),
        "num_hidden_layers": size(high=512),
        "num_attention_heads": size(high=1_024),
        "intermediate_size": _INNER_SIZE,
        "max_position_embeddings": _MAX_POSITIONS,
        "type_vocab_size": optional_int(default=2, high=1_024),
        "hidden_act": activation_field("gelu"),
        "hidden_dropout_prob": _SOME_DROPOUT,
        "attention_probs_dropout_prob": _SOME_DROPOUT,
        "initializer_range": INITIALIZER_RANGE,
        "layer_norm_eps": number(1e-12, low=1e-12, high=0.1),
    }


# Untied, transformers gives the head a bias that nothing uses.
_TIED = Field(kind="bool", default=True, only=True)

_BERT = Architecture(
    class_name="BertForMaskedLM",
    kind="encoder",
    fields={**_bert_like(bos=None, eos=None, pad=0), "tie_word_embeddings": _TIED},
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    uses_rope=False,
)

_ROBERTA = Architecture(
    class_name="RobertaForMaskedLM",
    kind="encoder",
    fields={**_bert_like(bos=0, eos=2, pad=1), "tie_word_embeddings": _TIED},
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    positions_follow_padding=True,
    uses_rope=False,
)

_ELECTRA = Architecture(
    class_name="ElectraForMaskedLM",
    kind="encoder",
    fields={**_bert_like(bos=None, eos=None, pad=0), "embedding_size": size(high=65_536)},
    aliases=ALIASES,
    hidden_divides_by_heads=True,
    uses_rope=False,
)

_DISTILBERT = Architecture(
    class_name="DistilBertForMaskedLM",
    kind="encoder",
    fields={
        **common(bos=None, eos=None, pad=0, tied=True),
        "dim": size(high=65_536),
        "n_layers": size(high=512),
        "n_heads": size(high=1_024),
        "hidden_dim": _INNER_SIZE,
        "max_position_embeddings": _MAX_POSITIONS,
        "sinusoidal_pos_embds": OFF,
        "activation": activation_field("gelu"),
        "dropout": _SOME_DROPOUT,
        "attention_dropout": _SOME_DROPOUT,
        "initializer_range": INITIALIZER_RANGE,
    },
    aliases={
        **ALIASES,
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
    hidden_size_key="dim",
    num_blocks_key="n_layers",
    num_heads_key="n_heads",
    hidden_divides_by_heads=True,
    uses_rope=False,
)

ENCODERS: Mapping[str, Architecture] = {
    "bert": _BERT,
    "distilbert": _DISTILBERT,
    "electra": _ELECTRA,
    "roberta": _ROBERTA,
}

T5_ACTIVATIONS = ("relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "gelu_new", "silu")

_T5 = Architecture(
    class_name="T5ForConditionalGeneration",
    kind="encoder_decoder",
    fields={
        # Without null: decoder inputs begin with the first, and stand in for labels that do not count with the second.
        **common(bos=None, eos=1, pad=0, tied=True),
        "pad_token_id": replace(token(0), nullable=False),
        "decoder_start_token_id": replace(token(0), nullable=False),
        "d_model": size(high=65_536),
        "d_kv": optional_int(default=64, high=1_024),
        "d_ff": _INNER_SIZE,
        "num_layers": size(high=512),
        "num_decoder_layers": optional_int(high=512),
        "num_heads": size(high=1_024),
        "relative_attention_num_buckets": optional_int(default=32, low=4, high=65_536),
        "relative_attention_max_distance": optional_int(default=128, low=4, high=MAX_POSITIONS),
        "dropout_rate": _SOME_DROPOUT,
        "layer_norm_epsilon": number(1e-6, low=1e-12, high=0.1),
        "initializer_factor": number(1.0, high=1e3),
        "feed_forward_proj": Field(kind="choice", default="relu", choices=T5_ACTIVATIONS),
    },
    aliases={
        **ALIASES,
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    },
    hidden_size_key="d_model",
    num_blocks_key="num_layers",
    num_decoder_blocks_key="num_decoder_layers",
    num_heads_key="num_heads",
    max_positions_key=None,
    uses_rope=False,
)

_BART = Architecture(
    class_name="BartForConditionalGeneration",
    kind="encoder_decoder",
    fields={
        **common(bos=0, eos=2, pad=1, tied=True),
        "pad_token_id": replace(token(1), nullable=False),
        "decoder_start_token_id": replace(token(2), nullable=False),
        "d_model": size(high=65_536),
        "encoder_layers": size(high=512),
        "decoder_layers": size(high=512),
        "encoder_ffn_dim": _INNER_SIZE,
        "decoder_ffn_dim": _INNER_SIZE,
        "encoder_attention_heads": size(high=1_024),
        "decoder_attention_heads": size(high=1_024),
        "max_position_embeddings": _MAX_POSITIONS,
        "activation_function": activation_field("gelu"),
        "dropout": _SOME_DROPOUT,
        "attention_dropout": DROPOUT,
        "activation_dropout": DROPOUT,
        "encoder_layerdrop": _NO_LAYER_DROP,
        "decoder_layerdrop": _NO_LAYER_DROP,
        "init_std": INITIALIZER_RANGE,
        "scale_embedding": OFF,
    },
    aliases=ALIASES,
    hidden_size_key="d_model",
    num_blocks_key="encoder_layers",
    num_decoder_blocks_key="decoder_layers",
    num_heads_key="encoder_attention_heads",
    more_heads_keys=("decoder_attention_heads",),
    hidden_divides_by_heads=True,
    uses_rope=False,
)

ENCODER_DECODERS: Mapping[str, Architecture] = {"bart": _BART, "t5": _T5}
