"""A short model that shows every distinct block of a deep one, and the lengths at which a model's ops change.

Read off the config; of what the config leaves to transformers' class, off that class's own object. Only a model whose type is not
listed is built for it, since its blocks alone show how they differ.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_config, build_model
from optimizer.models.decoder.config import (
    DECODER_TYPE,
    block_kinds,
    sequence_multiple,
    shortest_sequence,
    with_block_kinds,
)
from optimizer.models.schema.schema import ARCHITECTURES
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.profile.trace.depth import shorten_blocks

ENCODER, DECODER = "encoder", "decoder"
_DENSE = "dense"
_NUMBERS_OF_BLOCKS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "training"})
_DEPTH = re.compile(r"(^|_)n?_?(layers|layer|blocks)$")


def shorten_model(spec: ModelSpec) -> tuple[ModelSpec, list[int]]:
    """A model of few blocks, and for each block of the whole model which of them it is like."""
    if spec.is_listed:
        short_kinds, instances = shorten_blocks(list_block_kinds(spec))
        return with_blocks(spec, short_kinds), instances
    kinds, outside = _read_as_built(spec)
    short_kinds, instances = shorten_blocks(kinds)
    short = _shorten_config(spec, kinds, short_kinds)
    # What a config says of depth is known by trying: where the short model is not the one meant, the whole is traced.
    if short is not None and _try_to_read(short) == (short_kinds, outside):
        return short, instances
    return spec, list(range(len(kinds)))


def list_block_kinds(spec: ModelSpec) -> list[str]:
    """A mark of each block, first to last, that sets it apart from others of the model."""
    config = spec.config
    if spec.model_type == DECODER_TYPE:
        return block_kinds(config)
    architecture = ARCHITECTURES[spec.model_type]
    if architecture.num_decoder_blocks_key is not None:
        num_encoder_blocks: int = config[architecture.num_blocks_key]
        return [ENCODER] * num_encoder_blocks + [DECODER] * (spec.num_blocks - num_encoder_blocks)
    if "mlp_only_layers" in config:
        return _mlp_kinds(config)
    given = config.get("layer_types")
    if given is None and "layer_types" in architecture.fields:
        # What a configuration class fills in by itself (Gemma 2 alternates) is read from it.
        given = getattr(build_config(spec), "layer_types", None)
    return list(given) if given else ["block"] * spec.num_blocks


def with_blocks(spec: ModelSpec, kinds: Sequence[str]) -> ModelSpec:
    """The same model with blocks of these kinds."""
    config = spec.to_config()
    if spec.model_type == DECODER_TYPE:
        return read_model_spec(with_block_kinds(config, kinds))
    architecture = ARCHITECTURES[spec.model_type]
    if architecture.num_decoder_blocks_key is not None:
        config[architecture.num_blocks_key] = kinds.count(ENCODER)
        config[architecture.num_decoder_blocks_key] = kinds.count(DECODER)
        return read_model_spec(config)
    config[architecture.num_blocks_key] = len(kinds)
    if "mlp_only_layers" in config:
        config["decoder_sparse_step"] = 1
        config["mlp_only_layers"] = [block for block, kind in enumerate(kinds) if kind == _DENSE]
    elif "layer_types" in architecture.fields and set(kinds) != {"block"}:
        config["layer_types"] = list(kinds)
    return read_model_spec(config)


def sequence_steps(spec: ModelSpec) -> tuple[int, int]:
    """Sequences must be a multiple of the first and no shorter than the second for sizes to be polynomials."""
    if spec.model_type != DECODER_TYPE:
        return 1, 1
    return sequence_multiple(spec.config), shortest_sequence(spec.config)


def sequence_limits(spec: ModelSpec) -> list[int]:
    """Lengths up to and including which the ops do not change."""
    if not spec.is_listed:
        config = build_config(spec).to_dict()
        windows = {value for name, value in config.items() if "window" in name and type(value) is int and value > 1}
        return sorted(window - 1 for window in windows)
    window = spec.config.get("sliding_window")
    # transformers leaves the mask out only while the sequence is shorter than the window.
    return [window - 1] if isinstance(window, int) and spec.config.get("use_sliding_window", True) else []


def _mlp_kinds(config: Mapping[str, Any]) -> list[str]:
    """Experts, or one MLP (Qwen 3 with experts)."""
    dense, step = set(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
    return [
        "experts" if block not in dense and (block + 1) % step == 0 else _DENSE
        for block in range(config["num_hidden_layers"])
    ]


# Model types that are not listed.


def _read_as_built(spec: ModelSpec) -> tuple[list[str], list[tuple[int, ...]]]:
    """A text for each block: its modules, the shapes of its tensors, and the plain values that its modules were given. And the
    shapes of the tensors outside the blocks, some of which grow with the depth (Gemma 4's embeddings for each layer).
    """
    model = build_model(spec, device="meta")
    blocks = find_blocks(model)
    inside = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    outside = [tuple(tensor.shape) for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside]
    return [_fingerprint(block) for block in blocks], outside


def _try_to_read(spec: ModelSpec) -> tuple[list[str], list[tuple[int, ...]]] | None:
    try:
        return _read_as_built(spec)
    except Exception:
        # Of a config that does not mean what was supposed; the whole model was built before.
        return None


def _fingerprint(block: nn.Module) -> str:
    parts: list[object] = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and key not in _NUMBERS_OF_BLOCKS
        }
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = [(key, tuple(tensor.shape)) for key, tensor in tensors]
        parts.append((name, type(module).__qualname__, sorted(plain.items()), shapes))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _shorten_config(spec: ModelSpec, kinds: Sequence[str], short_kinds: Sequence[str]) -> ModelSpec | None:
    """Depth where the config says it, and every list with an entry for each block cut alike."""
    own = build_config(spec).to_dict()
    depths = [name for name, value in own.items() if _DEPTH.search(name) and value == len(kinds)]
    if len(depths) != 1:
        return None
    kept = _positions(kinds, short_kinds)
    config: dict[str, Any] = {**spec.to_config(), depths[0]: len(short_kinds)}
    for name, value in own.items():
        if isinstance(value, list) and len(value) == len(kinds):
            config[name] = [value[index] for index in kept]
    return replace(spec, config=config, num_blocks=len(short_kinds))


def _positions(kinds: Sequence[str], short_kinds: Sequence[str]) -> list[int]:
    """Positions of some block of each kind."""
    return [kinds.index(kind) for kind in short_kinds]
