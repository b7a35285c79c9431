"""Weights from files into a built model: strictly, tensor by tensor, without a second copy of the model.

Understands the names that published files use beside the model's own: a missing base prefix (GPT-2), experts one by one
(Mixtral, Qwen 3), an output projection of another name (GPT-NeoX), buffers that older versions saved, and a tied output
projection that is present or not.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from optimizer.base.errors import InvalidModel
from optimizer.models.files.readers import tensor_readers

_SAVED_BUFFERS = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
_EXPERT = re.compile(
    r"(?P<layer>.*\.)(block_sparse_moe|mlp)\.experts\.(?P<index>\d+)\.(?P<part>w[123]|(gate|up|down)_proj)\.weight"
)
_EXPERT_PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROUTER = re.compile(r"(?P<layer>.*\.)block_sparse_moe\.gate\.weight")
_OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill ``model`` from the files in ``folder`` (``readers.py``: safetensors, packed or not, or GGUF), converting to its dtype.

    Raises InvalidModel that names tensors which are missing, not expected, or of another shape; the model's weights are then
    undefined. The files' headers are checked first.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers())
    filled: set[str] = set()
    unexpected: list[str] = []
    with torch.no_grad():
        for tensor in tensor_readers(folder):
            if _SAVED_BUFFERS.search(tensor.name):
                continue
            if tensor.name in buffers:
                _copy(tensor.read(), buffers[tensor.name], name=tensor.name, is_filled=False)
                continue
            target = _find_target(tensor.name, model, parameters)
            if target is None:
                unexpected.append(tensor.name)
                continue
            key, destination = target
            is_filled = key not in filled and any(parameters.get(other) is destination for other in filled)
            _copy(tensor.read(), destination, name=tensor.name, is_filled=is_filled)
            filled.add(key)
    _require_complete(model, parameters, filled=filled, unexpected=unexpected)


def _find_target(name: str, model: nn.Module, parameters: dict[str, nn.Parameter]) -> tuple[str, torch.Tensor] | None:
    """The key that the tensor fills, and where its numbers go."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    for candidate in (name, f"{prefix}.{name}", _OTHER_NAMES.get(name, name)):
        if candidate in parameters:
            return candidate, parameters[candidate]
        expert = _find_expert(candidate, parameters)
        if expert is not None:
            return expert
    return None


def _find_expert(name: str, parameters: dict[str, nn.Parameter]) -> tuple[str, torch.Tensor] | None:
    """Published files hold each expert apart; the model holds all of a layer in two tensors."""
    router = _ROUTER.fullmatch(name)
    if router is not None:
        key = f"{router['layer']}mlp.gate.weight"
        return (key, parameters[key]) if key in parameters else None
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    part = _EXPERT_PARTS.get(match["part"], match["part"])
    key = f"{match['layer']}mlp.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"
    index = int(match["index"])
    if key not in parameters or index >= len(parameters[key]):
        return None
    expert = parameters[key][index]
    if part != "w2":
        gate, up = expert.chunk(2, dim=0)
        expert = gate if part == "w1" else up
    return f"{key}[{index}].{part}", expert


def _copy(source: torch.Tensor, destination: torch.Tensor, *, name: str, is_filled: bool) -> None:
    """``is_filled``: a tied tensor that another name has filled already; then the numbers must be the same."""
    if source.shape != destination.shape:
        raise InvalidModel(
            f"tensor {name} has shape {list(source.shape)}; the config asks for {list(destination.shape)}",
            field=f"weights.{name}",
            value=list(source.shape),
            allowed=list(destination.shape),
        )
    if is_filled and not torch.equal(destination, source.to(destination.dtype)):
        raise InvalidModel(
            f"tensor {name} differs from the one it is tied to by tie_word_embeddings",
            field=f"weights.{name}",
            value="different numbers",
            allowed="the same numbers, or tie_word_embeddings false",
        )
    destination.copy_(source)


def _require_complete(
    model: nn.Module, parameters: dict[str, nn.Parameter], *, filled: set[str], unexpected: list[str]
) -> None:
    filled_storages = {id(parameters[key]) for key in filled if key in parameters}
    missing = []
    for key, parameter in parameters.items():
        if id(parameter) in filled_storages:
            continue
        parts = _expert_parts(key, parameter)
        missing += [part for part in parts if part not in filled] if parts and filled.intersection(parts) else [key]
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
