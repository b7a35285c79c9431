"""Lists in sentences what a config.json asks for that its spec does not have, so that no estimate guesses silently.

The allow-list drops what it does not know (``spec.py``). Most of that changes nothing (token ids of tools, versions, what a
forward returns); what would make the model another one is listed here.
"""

from collections.abc import Mapping
from typing import Any

from optimizer.models.refusal import shown
from optimizer.models.spec import ModelSpec

_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "chunk_size_feed_forward": (0,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({}, []),
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False, True),
    "pretraining_tp": (1,),
    "layerdrop": (0, 0.0),
    "encoder_layerdrop": (0, 0.0),
    "decoder_layerdrop": (0, 0.0),
    "_attn_implementation": ("sdpa", "eager", "flash_attention_2"),
}
"""Keys that change what is computed or held, with the values that change nothing beside null."""
_WITHOUT_HEAD = ("Model", "PreTrainedModel", "ForPreTraining", "DoubleHeadsModel")
"""Ends of class names whose weights a language model takes."""


def describe_unread(config: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """One sentence for each; empty where the spec says all that the config does."""
    return tuple(sentence for find in (_head, _code, _packing, _keys) for sentence in find(config, spec))


def _head(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    ours = spec.config["architectures"][0]
    named = config.get("architectures")
    theirs = [str(name) for name in named] if isinstance(named, list) else []
    if not theirs or ours in theirs or theirs[0].endswith(_WITHOUT_HEAD):
        return []
    return [f"the config names {shown(theirs[0])}; this is an estimate of {ours}, with its projection and loss"]


def _code(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    if not config.get("auto_map"):
        return []
    ours = spec.config["architectures"][0]
    return [f"the config brings code of its own, which is not run; this is an estimate of transformers' {ours}"]


def _packing(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    packing = config.get("quantization_config")
    if not packing:
        return []
    method = packing.get("quant_method", "some method") if isinstance(packing, Mapping) else "some method"
    return [f"the config's weights are packed by {shown(method)}; this estimate holds weights as the plan says"]


def _keys(config: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    unread = [
        f"{name} {shown(config[name])}"
        for name, without_effect in _NOTHING.items()
        if name in config and name not in spec.config and config[name] is not None and config[name] not in without_effect
    ]
    return [f"of the config not read: {', '.join(unread)}"] if unread else []
