"""Keys of the decoder's config.json beyond those that all model types share, and the rules between them. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.models.refusal import refusal

DECODER_TYPE = "headroom_decoder"
ATTENTION_KINDS = ("full", "local", "block_sparse", "linear")
_BLOCKED_KINDS = frozenset(ATTENTION_KINDS) - {"full"}
"""Kinds that cut a sequence into runs of ``attention_block`` tokens."""


def finish_decoder_config(values: dict[str, Any]) -> None:
    """Fill in what follows from other keys and check what the keys ask of each other, in place.

    Raises InvalidModel that names the key.
    """
    num_layers = values["num_hidden_layers"]
    if values.get("layer_types") is None:
        values["layer_types"] = ["full"] * num_layers
    if values["positions"] == "rope" and values["head_dim"] % 2:
        raise refusal("head_dim", values["head_dim"], allowed="an even number, as rotary embeddings need")
    if values["sparse_embedding_gradients"] and values["tie_word_embeddings"]:
        raise refusal(
            "sparse_embedding_gradients",
            values["sparse_embedding_gradients"],
            allowed="false, unless tie_word_embeddings is false: an output projection has gradients of every row",
        )
    _finish_sharing(values, num_layers)
    _check_blocks(values)


def sequence_multiple(config: Mapping[str, Any]) -> int:
    """Training sequences must be a multiple of this; 1 where every layer has full attention.

    The module takes any length, by padding; what it then allocates is no polynomial in the length, so it cannot be planned.
    """
    return int(config["attention_block"]) if _BLOCKED_KINDS.intersection(config["layer_types"]) else 1


def shortest_sequence(config: Mapping[str, Any]) -> int:
    """Training sequences must be at least this long: shorter ones are padded to the global blocks."""
    if "block_sparse" not in config["layer_types"]:
        return 1
    block: int = config["attention_block"]
    num_global: int = config["sparse_global_blocks"]
    return block * num_global


def num_key_blocks(kind: str, config: Mapping[str, Any]) -> int:
    """Runs of keys that each run of queries sees up to its own, the global ones left out."""
    if kind == "local":
        window, block = int(config["local_window"]), int(config["attention_block"])
        return 1 + math.ceil((window - 1) / block)
    num_local: int = config["sparse_local_blocks"]
    return num_local


def owner_of_each_block(config: Mapping[str, Any]) -> list[int]:
    """For each block, the first block of its group: the one whose parameters it uses."""
    owners: list[int] = []
    for size in config["share_groups"]:
        owners += [len(owners)] * size
    return owners


def block_kinds(config: Mapping[str, Any]) -> list[str]:
    """The facts that distinguish blocks for a profile: the kind of attention, and the place among those that share parameters."""
    places = [place for size in config["share_groups"] for place in _places_in_group(size)]
    return [f"{kind}/{place}" for kind, place in zip(config["layer_types"], places, strict=True)]


def with_block_kinds(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The config of a model made of blocks like these, in this order."""
    layer_types, places = zip(*(kind.split("/") for kind in kinds), strict=True)
    sizes: list[int] = []
    for place in places:
        if place in ("alone", "first"):
            sizes.append(1)
        else:
            sizes[-1] += 1
    return {**config, "num_hidden_layers": len(kinds), "layer_types": list(layer_types), "share_groups": sizes}


def _places_in_group(size: int) -> list[str]:
    return ["alone"] if size == 1 else ["first", *["inner"] * (size - 2), "last"]


def _finish_sharing(values: dict[str, Any], num_layers: int) -> None:
    """``share_every`` becomes ``share_groups``, which is what is written."""
    share_every = values.pop("share_every")
    if share_every > num_layers:
        raise refusal("share_every", share_every, allowed=f"1 to num_hidden_layers ({num_layers})")
    if values["share_groups"] is None:
        values["share_groups"] = [min(share_every, num_layers - start) for start in range(0, num_layers, share_every)]
    if sum(values["share_groups"]) != num_layers:
        raise refusal(
            "share_groups", values["share_groups"], allowed=f"sizes that sum to num_hidden_layers ({num_layers})"
        )


def _check_blocks(values: dict[str, Any]) -> None:
    block, longest = values["attention_block"], values["max_position_embeddings"]
    kinds = set(values["layer_types"])
    width = values["num_key_value_heads"] * values["head_dim"]
    if _BLOCKED_KINDS & kinds and block > longest:
        raise refusal("attention_block", block, allowed=f"at most max_position_embeddings ({longest})")
    if "linear" in kinds and width % block:
        raise refusal(
            "attention_block",
            block,
            allowed=f"a divisor of num_key_value_heads * head_dim ({width}), because layer_types holds linear",
        )
    if "block_sparse" in kinds and values["sparse_global_blocks"] * block > longest:
        raise refusal(
            "sparse_global_blocks",
            values["sparse_global_blocks"],
            allowed=f"at most {longest // block} (max_position_embeddings / attention_block)",
        )
