"""A tiny config of any model type that transformers knows, made from the fields of its configuration class.

Sizes become small by their names (``_SIZES``), token ids come to lie within the small vocabulary, and lists with an entry for
each layer are cut so that every kind of layer stays. What a name does not say, ``_EXCEPTIONS`` does, by model type.
"""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

VOCAB_SIZE = 320
HIDDEN_SIZE = 64
NUM_HEADS = 4
NUM_MAMBA_HEADS = 8
"""Twice as wide as attention, as these layers are."""
HEAD_DIM = 16
NUM_LAYERS = 4
MAX_LAYERS = 8
MAX_POSITIONS = 512
NUM_SPECIAL = 32
"""Ids at the vocabulary's end that special tokens take."""
WINDOW = 16
"""Shorter than the sequence trained, so that masks differ between kinds of layers."""

_SIZES: tuple[tuple[str, int], ...] = (
    (r"^(vocab_size|vocab_size_per_layer_input|unpadded_vocab_size)$", VOCAB_SIZE),
    (r"^(hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|embedding_dim|word_embed_proj_dim|lru_width)$", HIDDEN_SIZE),
    (r"^(pronunciation_embed_dim|shape_embed_dim|input_embedding_size|output_embedding_size|backbone_hidden_size)$", HIDDEN_SIZE),
    (r"^(text_|projection_|router_|cross_attention_)hidden_size$", HIDDEN_SIZE),
    (r"^ngram_vocab_size_base$", VOCAB_SIZE),
    (r"^hidden_size_per_layer_input$", 16),
    (r"^(num_hidden_layers|n_layers?|num_layers|depth|num_blocks)$", NUM_LAYERS),
    (r"^(encoder|decoder)_layers$|^num_(encoder|decoder)_layers$", NUM_LAYERS),
    (r"(key_value|kv)_heads$", 2),
    (r"^mamba_(n|num)_heads$", NUM_MAMBA_HEADS),
    (r"(^|_)d_head$", HEAD_DIM),
    (r"(^|_)(n_|num_)?(attention_)?heads?$", NUM_HEADS),
    (r"^(head_dim|attention_head_(dim|size)|d_kv|qk_nope_head_dim|v_head_dim|kv_channels|global_head_dim)$", HEAD_DIM),
    (r"^(linear_|index_|swa_|mamba_)(key_|value_|v_)?(head_dim)$|^rotary_dim$", HEAD_DIM),
    (r"^qk_rope_head_dim$|^rope_head_dim$", 8),
    (r"^mamba_d_ssm$", 2 * HIDDEN_SIZE),
    (r"^(q|kv|o|gate)_lora_rank$|^\w*_rank$", 16),
    (r"^moe_intermediate_size$|expert\w*_intermediate_size$|^expert_ffn_hidden_size$|^shared_intermediate_size$", 48),
    (r"intermediate_size(_mlp)?$|^(encoder|decoder)_ffn_dim$|^(ffn_dim|n_inner|d_ff|d_inner|ffn_hidden_size)$", 128),
    (r"^feed_forward_size$|^intermediate_dim$|^dim_ff$|^dff$", 128),
    (r"^(num_|n_)?(routed_|local_)?experts$|^(moe_num_experts|num_routed_experts|zero_expert_num)$", 4),
    (r"(experts_per_tok|experts_per_token|moe_topk|moe_k|moe_top_k|top_k_experts|num_selected_experts)$", 2),
    (r"^(n_group|topk_group|num_expert_group|topk_groups)$", 1),
    (r"max_(\w+_)?position_embeddings$|^(n_positions|max_seq_len|n_ctx|context_length|max_target_positions)$", MAX_POSITIONS),
    (r"^max_source_positions$", 64),
    (r"^(sliding_window|attention_window_size|window_size|local_attention|attention_chunk_size)$", WINDOW),
    (r"^\w*sliding_window(_size)?$", WINDOW),
    (r"^(mamba_)?d_state$|^mamba_d_state$|^state_size$|^ssm_state_size$", 16),
    (r"^(mamba_)?chunk_size$", WINDOW),
    (r"^index_topk$", WINDOW),
    (r"^(image_size|input_size)$", 32),
    (r"^(patch_size|spatial_patch_size)$", 8),
)
"""Patterns of field names, the first that matches deciding."""
_TOKEN = re.compile(r"(_token_id|_token_index|_token_idx)$")
_WHEN_UNSAID = {"head_dim": HEAD_DIM, "num_key_value_heads": 2, "num_experts_per_tok": 2}
"""Fields that some classes leave open though their models need them."""
_DEPTHS = r"layers?$|^depth$|^num_blocks$"
_STARTS: dict[str, dict[str, Any]] = {}
"""Fields without which a configuration class makes none."""
_SAME = (("num_key_value_heads", "num_attention_heads"), ("head_dim", "qk_rope_head_dim"))
"""Fields that keep the value of another where the class gives both the same."""
_GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXED = {
    "indexer_n_heads": NUM_HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 4,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt.global_config": {"encoder_cross_output_size": 2 * HIDDEN_SIZE},
    "blt": {"encoder_hash_byte_group_size": [3, 4], "encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "deepseek_v2": {"first_k_dense_replace": 1},
    "dots1": _GROUPED,
    "dbrx.attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"full_attn_idxs": [1, 3], "block_multiple_of": 16},
    "mamba2": {"num_heads": NUM_MAMBA_HEADS, "head_dim": HEAD_DIM},
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "is_decoder": True,
        "max_position_embeddings": 64,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": WINDOW,
        "lsh_attn_chunk_length": WINDOW,
    },
    "qwen4_exp.text_config": _INDEXED,
}
"""Fields of a model type whose names do not say what they need."""


def make_tiny_config(model_type: str) -> dict[str, Any]:
    """The config.json of a tiny model of this type. Raises what transformers' configuration class raises."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    values = _shrink(config_class(**_STARTS.get(model_type, {})), key=model_type)
    document: dict[str, Any] = config_class(**values).to_diff_dict()
    return document


def _shrink(config: Any, *, key: str) -> dict[str, Any]:
    """Values to change of a configuration as its class makes it."""
    own = {field.name: _value_of(config, field.name) for field in dataclasses.fields(config)}
    parts = {name: value for name, value in own.items() if hasattr(value, "model_type") and hasattr(value, "to_dict")}
    plain = {name: value for name, value in own.items() if name not in parts}
    values = {name: small for name, value in plain.items() if (small := _shrunk(name, value)) != value}
    values |= {name: values[other] for name, other in _SAME if own.get(name) is not None and own[name] == own.get(other)}
    values |= _cut_layer_lists(plain, values)
    values |= {name: _inside_vocabulary(value) for name, value in plain.items() if _TOKEN.search(name)}
    values |= {name: _shrink(part, key=f"{key}.{name}") for name, part in parts.items()}
    return values | copy.deepcopy(_EXCEPTIONS.get(key, {}))


def _value_of(config: Any, name: str) -> Any:
    """A field's value, also where the class keeps it under another name or, by layer, hides it."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def _shrunk(name: str, value: Any) -> Any:
    if value is None:
        return _WHEN_UNSAID.get(name)
    if isinstance(value, list):
        return [_shrunk(name, each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((size for pattern, size in _SIZES if re.search(pattern, name)), value)


def _inside_vocabulary(value: Any) -> Any:
    """Ids as they are where the small vocabulary has them; else counted from its end, so that different ids stay different."""
    if isinstance(value, list):
        return [_inside_vocabulary(each) for each in value]
    is_inside = not isinstance(value, int) or value < VOCAB_SIZE
    return value if is_inside else VOCAB_SIZE - 1 - value % NUM_SPECIAL


def _cut_layer_lists(own: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, cut to the layers kept, and their number."""
    depth = next((name for name in changed if changed[name] == NUM_LAYERS and re.search(_DEPTHS, name)), None)
    if depth is None:
        return {}
    lists = {name: value for name, value in own.items() if isinstance(value, list) and len(value) == own[depth]}
    numbered = {name for name, value in lists.items() if value == list(range(own[depth]))}
    kinds = [value for name, value in lists.items() if name not in numbered]
    if not kinds:
        return {}
    kept = _choose_layers(list(zip(*kinds, strict=True)))
    cut = {name: _shrunk(name, [value[index] for index in kept]) for name, value in lists.items()}
    return {depth: len(kept)} | cut | {name: list(range(len(kept))) for name in numbered}


def _choose_layers(kinds: Sequence[Any]) -> list[int]:
    """The first layers as far as they show every kind; where those are too many, one of each kind and the last."""
    marks = [repr(kind) for kind in kinds]
    length = next(end for end in range(1, len(marks) + 1) if set(marks[:end]) == set(marks))
    if length <= MAX_LAYERS:
        return list(range(min(max(length, NUM_LAYERS), len(marks))))
    return sorted({marks.index(mark) for mark in marks} | {len(marks) - 1})
