"""Says which part of each block is whose where ranks share them: fewer heads and neurons of the same architecture. Torch-free.

Heads of queries and of keys, and the inner width of the MLP, are divided by the number of ranks; all else stays: hidden states,
the width of a head, the vocabulary. So a rank's blocks run, save and recompute as any model's, and have a profile as any model's.
A matrix that goes into a block's heads or neurons loses rows, one that comes out of them columns (Shoeybi et al., Megatron-LM,
2019, section 3); several that lie in one matrix each lose theirs. Which ones those are agrees with transformers' own plans
(``base_model_tp_plan``), which tests compare.

Left out: experts, norms over all heads together, and models that have no width of a head beside its heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from optimizer.base.errors import InvalidPlan

INTO: Final = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc"})
"""Names of the linear layers that make what a rank has a part of: each rank has some of their outputs."""
OUT_OF: Final = frozenset({"o_proj", "dense", "down_proj", "fc2", "c_proj"})
"""Names of those that take it: each rank has some of their inputs, and the results of all are summed."""
_OUT_OF_HEADS: Final = ("o_proj", "dense")
SHARED_TYPES: Final = frozenset(
    {
        "cohere",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "headroom_decoder",
        "llama",
        "mistral",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "starcoder2",
    }
)
"""Model types whose blocks ranks can share."""
_DIVIDED: Final = {
    "num_attention_heads": "heads",
    "num_key_value_heads": "heads of keys",
    "intermediate_size": "neurons of each MLP",
}
_OVER_ALL_HEADS: Final = ("use_qk_norm", "qk_layernorm")
_FIELD: Final = "plan.layout.tensor"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of a tensor that one of several ranks has: equal pieces of neighbouring numbers along a dimension."""

    dim: int
    parts: tuple[int, ...]
    """Lengths along the dimension of the whole tensor's matrices, of each of which a rank has its piece: several where several
    lie in one tensor."""

    def pieces_of(self, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Start and length of a rank's piece of each part, in the whole tensor."""
        starts = [sum(self.parts[:index]) for index in range(len(self.parts))]
        sizes = [length // num_ranks for length in self.parts]
        return [(start + rank * size, size) for start, size in zip(starts, sizes, strict=True)]


def find_obstacle(config: Mapping[str, Any], num_ranks: int) -> str:
    """Find why so many ranks cannot share a model's blocks, in words; empty where they can. config: of a spec."""
    model_type = config["model_type"]
    if model_type not in SHARED_TYPES:
        return f"blocks of {model_type} cannot be shared by devices; those of {', '.join(sorted(SHARED_TYPES))} can"
    for key, name in _DIVIDED.items():
        if config[key] % num_ranks:
            return f"the model has {config[key]} {name} ({key}), which {num_ranks} devices cannot share equally"
    norm = next((key for key in _OVER_ALL_HEADS if config.get(key)), "")
    if norm:
        return f"the model's queries and keys have norms that depend on all heads ({norm})"
    dropout = next((key for key, value in config.items() if _is_dropout(key) and value), "")
    if dropout:
        return f"the model has dropout ({dropout} is {config[dropout]:g}), for which devices would need the same random numbers"
    return ""


def narrow_config(config: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """The config of the model that each of so many ranks builds. Raises InvalidPlan in words where they cannot share its
    blocks.
    """
    obstacle = find_obstacle(config, num_ranks)
    if obstacle:
        raise InvalidPlan(f"{_FIELD} is {num_ranks}; {obstacle}", field=_FIELD, value=num_ranks, allowed=obstacle)
    divided = {key: config[key] // num_ranks for key in _DIVIDED}
    return {**config, "head_dim": _head_dim(config), **divided}


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths of a whole model that ranks divide, in numbers of a hidden state's."""

    queries: int
    """The width of all heads together."""
    keys: int
    inner: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, num_ranks: int = 1) -> "Widths":
        """config: of the whole model, or of one rank's of so many."""
        head_dim = num_ranks * _head_dim(config)
        queries, keys = (config[key] * head_dim for key in ("num_attention_heads", "num_key_value_heads"))
        return cls(queries=queries, keys=keys, inner=num_ranks * config["intermediate_size"])


def find_slice(name: str, widths: Widths) -> Slice | None:
    """The slice of a parameter that each rank has, by its name, with adapters or without; None of one that all have.
    widths: of the whole model.
    """
    layer = find_layer(name)
    if not is_sliced(name):
        return None
    if layer in INTO:
        inner, queries, keys = widths.inner, widths.queries, widths.keys
        of_heads = {"q_proj": (queries,), "k_proj": (keys,), "v_proj": (keys,), "qkv_proj": (queries, keys, keys)}
        return Slice(dim=0, parts=of_heads.get(layer, (inner, inner) if layer == "gate_up_proj" else (inner,)))
    return Slice(dim=1, parts=(widths.queries if layer in _OUT_OF_HEADS else widths.inner,))


def is_sliced(name: str) -> bool:
    """Report whether each rank has a part of a parameter."""
    parts, layer = name.split("."), find_layer(name)
    leads_in = layer in INTO and "lora_A" not in parts
    return leads_in or (layer in OUT_OF and "lora_B" not in parts and parts[-1] != "bias")


def find_layer(name: str) -> str:
    """The shared linear layer that a parameter or module belongs to; empty where it is of none."""
    return next((part for part in name.split(".") if part in INTO | OUT_OF), "")


def is_partial(name: str) -> bool:
    """Report whether each rank has a part of the gradient of a tensor that all have: one of those that work between what a
    block's part is given and the sum that it ends in.
    """
    parts, layer = name.split("."), find_layer(name)
    is_of_heads = any(part in ("q_norm", "k_norm") for part in parts)
    return is_of_heads or (layer in INTO and "lora_A" in parts) or (layer in OUT_OF and "lora_B" in parts)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _is_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")
