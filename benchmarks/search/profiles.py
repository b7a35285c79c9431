"""Profiles of models for problems: tiny ones of any depth, and a 70B Llama cut or stretched to a depth.

A profile does not grow with depth: one traced model with blocks of each kind is enough, and another depth is its list of blocks
told again.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from optimizer.models.spec import read_model_spec
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model

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
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@cache
def tiny_profile(name: str) -> Profile:
    return profile_model(read_model_spec(TINY[name]))


@cache
def llama_70b_profile() -> Profile:
    return profile_model(read_model_spec(LLAMA_70B))


def with_depth(profile: Profile, num_blocks: int) -> Profile:
    """The same model with so many blocks, two or more: its first, those between told again and again, its last."""
    if num_blocks == profile.num_blocks:
        return profile
    regimes = {
        name: tuple(
            replace(regime, block_templates=_again(regime.block_templates, num_blocks)) for regime in regimes
        )
        for name, regimes in profile.regimes.items()
    }
    tensors = replace(profile.tensors, block_kinds=_again(profile.tensors.block_kinds, num_blocks))
    return replace(profile, num_blocks=num_blocks, tensors=tensors, regimes=regimes)


def _again(kinds: tuple[int, ...], num_blocks: int) -> tuple[int, ...]:
    between = kinds[1:-1]
    return (kinds[0], *(between[index % len(between)] for index in range(num_blocks - 2)), kinds[-1])
