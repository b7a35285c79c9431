"""Weights from files into a built model: strictly, tensor by tensor, without a second copy of the model.

Understands the names that published files use beside the model's own: a missing base prefix (GPT-2), experts one by one
(Mixtral, Qwen 3), an output projection of another name (GPT-NeoX), buffers that older versions saved, and a tied output
projection that is present or not.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.formats.shared_blocks import Slice
from optimizer.models.files.readers import TensorReader, tensor_readers

_SAVED_BUFFERS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_EXPERT = re.compile(
    r"(?P<layer>.*\.)(block_sparse_moe|mlp)\.experts\.(?P<index>\d+)\.(?P<part>w[123]|(gate|up|down)_proj)\.weight"
)
_EXPERT_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROUTER = re.compile(r"(?P<layer>.*\.)block_sparse_moe\.gate\.weight")
_OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}


@dataclass(frozen=True, kw_only=True)
class WeightRead:
    """The numbers of one parameter or buffer of a model, read from files when asked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of what ``read`` returns, which is the file's."""
    read: Callable[[], torch.Tensor]
    """A new tensor on the CPU. Raises InvalidModel where a tied tensor is there twice and differs."""
    read_slice: Callable[[Slice, int, int], torch.Tensor] | None = None
    """The same of a rank's slice among so many, without the rest; None where the whole has to be read."""


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill ``model`` from the files in ``folder`` (``readers.py``: safetensors, packed or not, or GGUF), converting to its dtype.

    Raises as ``find_reads``, and InvalidModel where tied tensors differ; the model's weights are then undefined.
    """
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, weight in find_reads(model, folder).items():
            places[name].copy_(weight.read())


def find_reads(model: nn.Module, folder: str | Path) -> dict[str, WeightRead]:
    """Find where each parameter's numbers, and each buffer's that files hold, are read; in the model's order, tied ones once.

    model: its parameters may be on ``meta``. Reads headers alone. Raises InvalidModel that names tensors which are missing, not
    expected, or of another shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    parts: dict[str, list[_Part]] = {}
    unexpected: list[str] = []
    for reader in tensor_readers(folder):
        if _SAVED_BUFFERS.search(reader.name):
            continue
        part = _find_part(reader, model, parameters | buffers)
        if part is None:
            unexpected.append(reader.name)
            continue
        _require_shape(reader, part.shape)
        parts.setdefault(part.key, []).append(part)
    _require_complete(model, parameters, parts=parts, unexpected=unexpected)
    return _join_tied(parameters, parts) | {name: _one(parts[name][0]) for name in buffers if name in parts}


class _Part(NamedTuple):
    """A tensor of a file, and the place in a parameter that it fills."""

    key: str
    label: str
    """The key, with the part of it where the tensor fills a part."""
    expert: int | None
    half: int | None
    """Rows of an expert's gate and up projections."""
    shape: tuple[int, ...]
    reader: TensorReader


def _find_part(reader: TensorReader, model: nn.Module, places: Mapping[str, torch.Tensor]) -> _Part | None:
    """The key that the tensor fills, and where in it its numbers go."""
    name, prefix = reader.name, str(getattr(model, "base_model_prefix", ""))
    for candidate in (name, f"{prefix}.{name}", _OTHER_NAMES.get(name, name)):
        if candidate in places:
            return _Part(candidate, candidate, None, None, tuple(places[candidate].shape), reader)
        expert = _find_expert(candidate, reader, places)
        if expert is not None:
            return expert
    return None


def _find_expert(name: str, reader: TensorReader, places: Mapping[str, torch.Tensor]) -> _Part | None:
    """Published files hold each expert apart; the model holds all of a layer in two tensors."""
    router = _ROUTER.fullmatch(name)
    if router is not None:
        key = f"{router['layer']}mlp.gate.weight"
        return _Part(key, key, None, None, tuple(places[key].shape), reader) if key in places else None
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    part = _EXPERT_PARTS.get(match["part"], match["part"])
    key = f"{match['layer']}mlp.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"
    index = int(match["index"])
    if key not in places or index >= len(places[key]):
        return None
    num_rows, num_columns = places[key].shape[1:]
    half = {"w1": 0, "w3": 1}.get(part)
    shape = (num_rows if half is None else num_rows // 2, num_columns)
    return _Part(key, f"{key}[{index}].{part}", index, half, shape, reader)


def _require_shape(reader: TensorReader, shape: tuple[int, ...]) -> None:
    if reader.shape != shape:
        raise InvalidModel(
            f"tensor {reader.name} has shape {list(reader.shape)}; the config asks for {list(shape)}",
            field=f"weights.{reader.name}",
            value=list(reader.shape),
            allowed=list(shape),
        )


def _join_tied(parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Sequence[_Part]]) -> dict[str, WeightRead]:
    """One read for each parameter, under its first name; files may hold it under several, then with the same numbers."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    reads: dict[str, WeightRead] = {}
    for tied in names.values():
        found = [name for name in tied if name in parts]
        first, others = found[0], [parts[name][0].reader for name in found[1:]]
        weight = _stack(parameters[first], parts[first]) if parts[first][0].expert is not None else _one(parts[first][0])
        reads[tied[0]] = replace(weight, read=partial(_read_tied, weight, others), read_slice=None) if others else weight
    return reads


def _one(part: _Part) -> WeightRead:
    reader = part.reader
    return WeightRead(shape=part.shape, dtype=reader.dtype, read=reader.read, read_slice=reader.read_slice)


def _stack(parameter: torch.Tensor, parts: Sequence[_Part]) -> WeightRead:
    dtype = parts[0].reader.dtype
    return WeightRead(shape=tuple(parameter.shape), dtype=dtype, read=partial(_read_stack, tuple(parameter.shape), dtype, parts))


def _read_stack(shape: tuple[int, ...], dtype: torch.dtype, parts: Sequence[_Part]) -> torch.Tensor:
    """Plain experts are read to their places; of others one is in memory at a time beside the stack."""
    stack = torch.empty(shape, dtype=dtype)
    for part in parts:
        assert part.expert is not None
        place = stack[part.expert]
        if part.half is not None:
            place = place.chunk(2, dim=0)[part.half]
        if part.reader.read_into is not None and part.reader.dtype == dtype:
            part.reader.read_into(place)
        else:
            place.copy_(part.reader.read())
    return stack


def _read_tied(weight: WeightRead, others: Sequence[TensorReader]) -> torch.Tensor:
    tensor = weight.read()
    for other in others:
        if not torch.equal(tensor, other.read().to(tensor.dtype)):
            raise InvalidModel(
                f"tensor {other.name} differs from the one it is tied to by tie_word_embeddings",
                field=f"weights.{other.name}",
                value="different numbers",
                allowed="the same numbers, or tie_word_embeddings false",
            )
    return tensor


def _require_complete(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    *,
    parts: Mapping[str, Sequence[_Part]],
    unexpected: list[str],
) -> None:
    filled_storages = {id(parameters[key]) for key in parts if key in parameters}
    missing = []
    for key, parameter in parameters.items():
        if id(parameter) not in filled_storages:
            missing.append(key)
        elif key in parts and parts[key][0].expert is not None:
            labels = {part.label for part in parts[key]}
            missing += [label for label in _expert_parts(key, parameter) if label not in labels]
    if missing or unexpected:
        raise InvalidModel(
            f"the weights do not match the config of {type(model).__name__}: "
            f"{_listed('missing', missing)}; {_listed('not expected', unexpected)}",
            field="weights",
            value={"missing": missing[:20], "unexpected": unexpected[:20]},
            allowed="exactly the tensors of the model that config.json describes",
        )


def _expert_parts(key: str, parameter: nn.Parameter) -> list[str]:
    if key.endswith(".mlp.experts.down_proj"):
        return [f"{key}[{index}].w2" for index in range(len(parameter))]
    if key.endswith(".mlp.experts.gate_up_proj"):
        return [f"{key}[{index}].{part}" for index in range(len(parameter)) for part in ("w1", "w3")]
    return []


def _listed(label: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    if not ordered:
        return f"none {label}"
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return f"{len(ordered)} {label} ({', '.join(ordered[:5])}{more})"
