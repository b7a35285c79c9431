"""Profiles of models for problems: tiny ones of any depth, and a 70B Llama cut or stretched to a depth.

A profile does not grow with depth: one traced model with blocks of each kind is enough, and another depth is its list of blocks
repeated.
"""

from functools import cache
from typing import Any

from benchmarks.planning import LLAMA_70B
from optimizer.models.spec import read_model_spec
from optimizer.profile.deeper import take_blocks
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model

_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_TINY},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_TINY,
        "head_dim": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512},
}
"""Blocks alike, blocks of two kinds, and blocks that hold most of the memory in attention."""

@cache
def tiny_profile(name: str) -> Profile:
    return profile_model(read_model_spec(TINY[name]))


@cache
def llama_70b_profile() -> Profile:
    return profile_model(read_model_spec(LLAMA_70B))


def with_depth(profile: Profile, num_blocks: int) -> Profile:
    """The same model with so many blocks, two or more: its first, those between again and again, its last. Periods may be cut."""
    if num_blocks == profile.num_blocks:
        return profile
    num_between = profile.num_blocks - 2
    between = [1 + index % num_between for index in range(num_blocks - 2)]
    return take_blocks(profile, (0, *between, profile.num_blocks - 1))
