"""The models of ``benchmarks.accuracy``: model types, shapes, and the config.json of each.

Tiny models serve bytes alone, since bookkeeping does not depend on size; ``small`` ones take steps long enough to be timed.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a case's model and batch."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_key_value_heads: int
    vocab_size: int
    sequence_length: int
    global_batch_size: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        hidden_size=96,
        intermediate_size=256,
        num_blocks=4,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        sequence_length=64,
        global_batch_size=4,
    ),
    "odd": Shape(
        hidden_size=80,
        intermediate_size=208,
        num_blocks=3,
        num_heads=5,
        num_key_value_heads=5,
        vocab_size=1031,
        sequence_length=47,
        global_batch_size=4,
    ),
    "small": Shape(
        hidden_size=256,
        intermediate_size=704,
        num_blocks=4,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        sequence_length=128,
        global_batch_size=4,
    ),
    "long": Shape(
        hidden_size=192,
        intermediate_size=512,
        num_blocks=6,
        num_heads=6,
        num_key_value_heads=6,
        vocab_size=1024,
        sequence_length=256,
        global_batch_size=4,
    ),
    "slow": Shape(
        hidden_size=128,
        intermediate_size=352,
        num_blocks=2,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        sequence_length=64,
        global_batch_size=4,
    ),
}
"""slow: for dtypes that a CPU multiplies many times slower than fp32."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {},
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "headroom_decoder": {"attention_block": 8, "local_window": 12},
    "bert": {},
    "t5": {},
    "bart": {},
    "roberta": {},
    "falcon": {},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Keys of each model type that differ from the common ones (``make_config``)."""
BRIEF = frozenset({"roberta", "falcon", "gpt_neox", "phi", "starcoder2", "gemma3_text", "qwen3_moe"})
"""Cousins of others: fewer cases."""
BRIEF_SHARE = 3
"""Divisor of their number of cases."""
WITHOUT_CACHE = frozenset({"bert", "roberta", "t5", "bart"})
"""No decoders alone, which generate nothing here."""


def make_config(model: str, shape: Shape) -> dict[str, Any]:
    """A config.json of this type and shape."""
    if model == "gpt2":
        return {
            "model_type": model,
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_blocks,
            "n_head": shape.num_heads,
            "n_inner": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "n_positions": 2 * shape.sequence_length,
        }
    common: dict[str, Any] = {
        "model_type": model,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_blocks,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 2 * shape.sequence_length,
    }
    if model == "opt":
        return {**common, "word_embed_proj_dim": shape.hidden_size, "ffn_dim": shape.intermediate_size}
    if model == "bart":
        return {
            "model_type": model,
            "vocab_size": shape.vocab_size,
            "d_model": shape.hidden_size,
            "encoder_layers": shape.num_blocks // 2,
            "decoder_layers": shape.num_blocks - shape.num_blocks // 2,
            "encoder_attention_heads": shape.num_heads,
            "decoder_attention_heads": shape.num_heads,
            "encoder_ffn_dim": shape.intermediate_size,
            "decoder_ffn_dim": shape.intermediate_size,
            "max_position_embeddings": 2 * shape.sequence_length,
        }
    if model == "t5":
        return {
            "model_type": model,
            "vocab_size": shape.vocab_size,
            "d_model": shape.hidden_size,
            "d_kv": shape.hidden_size // shape.num_heads,
            "d_ff": shape.intermediate_size,
            "num_layers": shape.num_blocks // 2,
            "num_decoder_layers": shape.num_blocks - shape.num_blocks // 2,
            "num_heads": shape.num_heads,
            "feed_forward_proj": "gated-gelu",
        }
    common |= {"intermediate_size": shape.intermediate_size, "num_key_value_heads": shape.num_key_value_heads}
    if model in ("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe"):
        common["head_dim"] = shape.hidden_size // shape.num_heads
    if model == "headroom_decoder":
        kinds = ["full", "local", "linear", "full", "local", "full"]
        common["layer_types"] = kinds[: shape.num_blocks]
    return {**common, **MODELS[model]}
