"""A ModelSpec becomes a torch module: transformers' own definition of the architecture, or our decoder, random or given weights.

The one place that touches transformers' model classes. Nothing is ever fetched: offline mode is switched on before
transformers is imported. Loading weights is in load.py, writing them in export.py.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.base.heap import without_collections
from optimizer.models.anatomy import find_text_part, sees_images_alone
from optimizer.models.declared import decode_numbers
from optimizer.models.decoder.config import DECODER_TYPE
from optimizer.models.decoder.model import Decoder
from optimizer.models.files.load import load_weights
from optimizer.models.spec import ModelSpec, read_model_spec

__all__ = ["build_model", "load_model", "load_weights"]

_EAGER_ATTENTION_MODEL_TYPES = frozenset({"gemma2"})
"""No fused kernel applies a soft cap to attention scores; transformers refuses sdpa for these."""
_MODULES = {"gemma3_text": "gemma3"}
"""Modules of model types that are not called after them."""
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def build_model(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> nn.Module:
    """A language model in training mode with random weights that depend on ``spec``, ``dtype`` and ``seed`` only.

    Of a model that takes images or sound beside text only the text part is trained; the others are frozen.
    On the device ``meta`` nothing is allocated. The caller's random state is left as it was. Weights are drawn on the CPU
    and then moved, so that CUDA starts from the same ones.
    """
    is_meta = torch.device(device).type == "meta"
    unfilled = _Unfilled() if is_meta else nullcontext()  # type: ignore[no-untyped-call]
    with _seeded(seed), torch.device("meta" if is_meta else "cpu"), unfilled:
        model = _make(spec, dtype)
    if is_meta:
        # Some definitions draw a tensor where no device is asked for.
        model.to("meta")
    is_there = is_meta or torch.device(device).type == "cpu"
    return (model if is_there else model.to(device)).train()


def build_unfilled(spec: ModelSpec, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model with parameters on ``meta``, to be read from files; buffers, which no file holds, are computed as ever."""
    unfilled = _Unfilled()  # type: ignore[no-untyped-call]
    with _seeded(0), _parameters_on_meta(), unfilled:
        return _make(spec, dtype).train()


def load_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """The model in a folder that this program exported, or one like it: config.json beside safetensors. In evaluation mode.

    dtype: what the config names unless given, fp32 where it names none. Raises InvalidModel, UnsupportedModelType.
    """
    spec = read_model_spec(json.loads((Path(folder) / "config.json").read_text()))
    named: torch.dtype = getattr(torch, spec.config.get("dtype") or "float32")
    model = build_model(spec, dtype=dtype or named)
    load_weights(model, folder)
    return model.to(device).eval()


def _make(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    if spec.model_type == DECODER_TYPE:
        return Decoder(spec.to_config(), dtype=dtype)
    model = _build_published(spec, dtype)
    _freeze_other_parts(model)
    return model


def _freeze_other_parts(model: nn.Module) -> None:
    """Freezes, in a model with parts for images or sound, all but what text runs through: its decoder, embedding and head."""
    decoder = find_text_part(model)
    if decoder is None:
        return
    model.requires_grad_(requires_grad=False)
    for part in (decoder, model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        if part is not None:
            part.requires_grad_(requires_grad=True)
    for module in decoder.modules():
        if sees_images_alone(module):
            module.requires_grad_(requires_grad=False)


def _build_published(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    config = build_config(spec)
    _keep_no_cache(config)
    model_class = _find_class(spec)
    attention = "eager" if spec.model_type in _EAGER_ATTENTION_MODEL_TYPES else "sdpa"
    if not spec.is_listed and not getattr(model_class, "_supports_sdpa", False):
        attention = "eager"
    options = {"dtype": dtype, "attn_implementation": attention}
    if any(getattr(config, key, None) for key in _EXPERT_KEYS) and _takes_experts(model_class, spec):
        # One grouped product over all experts; the loop over experts that were hit has shapes that depend on the data.
        options["experts_implementation"] = "grouped_mm"
    model: nn.Module = model_class._from_config(config, **options)
    return model


def _keep_no_cache(config: Any) -> None:
    """No keys and values stay beside a training step: a text part asks its own config, and recomputing would add them again."""
    config.use_cache = False
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            _keep_no_cache(part)


def _takes_experts(model_class: Any, spec: ModelSpec) -> bool:
    """Some model definitions have experts of their own, which run as they are written."""
    return spec.is_listed or bool(model_class._can_set_experts_implementation())


def build_config(spec: ModelSpec) -> Any:
    """transformers' own configuration, with what its class fills in by itself; not for our decoder, which has none."""
    values = spec.to_config()
    del values["model_type"]
    config_class = _find_class(spec).config_class if spec.is_listed else find_config_class(spec.model_type)
    return config_class(**decode_numbers(values))


def _find_class(spec: ModelSpec) -> Any:
    """Find a published model's class in its own module: looking classes up by name imports every architecture there is."""
    go_offline()
    name = spec.config["architectures"][0]
    if spec.is_listed:
        folder = _MODULES.get(spec.model_type, spec.model_type)
        return getattr(_import(f"transformers.models.{folder}.modeling_{folder}"), name)
    return find_model_class(spec.model_type, name)


def find_model_class(model_type: str, name: str) -> Any:
    """transformers' model class of this name for a model type that it knows."""
    place = find_config_class(model_type).__module__.replace(".configuration_", ".modeling_")
    try:
        return getattr(_import(place), name)
    except (AttributeError, ModuleNotFoundError):
        # Some model types are another's class with a configuration of their own.
        import transformers

        return getattr(transformers, name)


def _import(name: str) -> ModuleType:
    with without_collections():
        return import_module(name)


def find_config_class(model_type: str) -> Any:
    """transformers' configuration class of a model type that it knows."""
    go_offline()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def go_offline() -> None:
    """Forbid every request to a model hub in this process, whether or not its library is already imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out the filling of tensors that have no data: on ``meta`` those ops are Python code of torch's, and slow."""

    _fills = frozenset(
        {
            torch.ops.aten.fill_.Scalar,
            torch.ops.aten.normal_.default,
            torch.ops.aten.uniform_.default,
            torch.ops.aten.zero_.default,
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._fills and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their data as a module takes them, before anything is written to it, so that no page of it is touched."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
