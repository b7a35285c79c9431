"""Writes a trained model as a folder that ``AutoModelForCausalLM.from_pretrained`` loads without this program, and adapters as
one that peft's ``PeftModel.from_pretrained`` does.

A folder appears complete or not at all; each file comes back with its size and sha256. Tied weights are written once, and
Mixtral's experts one by one, under the names that published checkpoints use.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from optimizer.base.errors import DiskFull
from optimizer.data.tokenizer import load_tokenizer
from optimizer.models.adapters import adapter_config, adapter_file_name
from optimizer.models.files.sidecars import GENERATION_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, sidecar_files
from optimizer.models.files.tensor_files import TensorEntry, write_tensors
from optimizer.models.spec import ModelSpec

ExportDtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[ExportDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_NAMES: dict[ExportDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file of an exported folder."""

    name: str
    """Inside the folder."""
    num_bytes: int
    sha256: str


class _ExpertNames(NamedTuple):
    """Names in published files of the parts of a layer of experts."""

    module: str
    gate: str
    up: str
    down: str


_EXPERT_NAMES = {
    "mixtral": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}


def export_model(
    model: nn.Module,
    spec: ModelSpec,
    *,
    folder: str | Path,
    dtype: ExportDtype = "fp32",
    tensors: Sequence[TensorEntry] | None = None,
    max_shard_bytes: int | None = None,
    tokenizer_file: str | Path | None = None,
    chat_template: str | None = None,
    sidecar_folder: str | Path | None = None,
) -> list[ExportedFile]:
    """Write config.json, generation_config.json, the weights and, where given, the tokenizer, into a new ``folder``.

    The model is only read, one tensor at a time; its weights may be on any device.
    tensors: what to write in place of the model's own parameters, under the model's names, each already in its dtype.
    max_shard_bytes: weights beyond it are spread over several files with an index; None for one file.
    tokenizer_file: the tokenizer the model was trained with, the bundled one included.
    sidecar_folder: of the model that it was trained from, whose chat templates, special tokens and generation settings go along
    as they are (``sidecars.py``); what it lacks is written.
    Raises FileExistsError where ``folder`` exists, DiskFull.
    """
    entries = list_parameters(model, dtype=export_dtype(dtype)) if tensors is None else tensors
    with staged_folder(Path(folder)) as stage:
        end_of_text_id = _write_tokenizer(stage, spec, tokenizer_file, chat_template) if tokenizer_file else None
        carried = _carry_over(sidecar_folder, stage)
        if TOKENIZER_CONFIG_FILE in carried or GENERATION_FILE in carried:
            end_of_text_id = None  # its makers say which tokens end an answer
        published = published_entries(entries, spec)
        write_tensors(published, folder=stage, max_shard_bytes=max_shard_bytes)
        _write_json(stage / "config.json", _loadable_config(spec, dtype, end_of_text_id))
        if GENERATION_FILE not in carried:
            _write_json(stage / GENERATION_FILE, _generation_config(spec, end_of_text_id))
    return describe_all(Path(folder))


def export_adapters(
    model: nn.Module, *, folder: str | Path, tensors: Sequence[TensorEntry], sidecar_folder: str | Path | None = None
) -> list[ExportedFile]:
    """Write adapter_config.json and adapter_model.safetensors, which peft reads only whole, into a new ``folder``.

    tensors: of the adapters alone, under the model's names. sidecar_folder: as ``export_model``'s. Raises as that.
    """
    with staged_folder(Path(folder)) as stage:
        _carry_over(sidecar_folder, stage, leave_out=(GENERATION_FILE,))
        named = [replace(entry, name=adapter_file_name(entry.name)) for entry in tensors]
        write_tensors(named, folder=stage, stem="adapter_model")
        _write_json(stage / "adapter_config.json", adapter_config(model))
    return describe_all(Path(folder))


def published_entries(entries: Sequence[TensorEntry], spec: ModelSpec) -> list[TensorEntry]:
    """The tensors that published checkpoints hold in the place of a model's own."""
    return [part for entry in entries for part in _published_parts(entry, spec.model_type)]


def export_dtype(name: ExportDtype) -> torch.dtype:
    return _DTYPES[name]


def list_parameters(model: nn.Module, *, dtype: torch.dtype) -> list[TensorEntry]:
    """Every parameter as it is now, tied ones once."""
    return [
        TensorEntry(name=name, shape=tuple(parameter.shape), dtype=dtype, read=parameter.detach)
        for name, parameter in model.named_parameters()
    ]


@contextmanager
def staged_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that takes its place at the end, synced; gone where anything failed."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; export writes a new folder")
    stage = folder.with_name(f".{folder.name}.stage")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        _sync((*stage.rglob("*"), stage))
        stage.rename(folder)
        _sync((folder.parent,))
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no room for the exported model under {folder.parent}", folder=str(folder.parent)
            ) from error
        raise
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _published_parts(entry: TensorEntry, model_type: str) -> list[TensorEntry]:
    """The tensors that published checkpoints hold in the entry's place (``load.py`` reads them back)."""
    names = _EXPERT_NAMES.get(model_type)
    layer, _, rest = entry.name.partition(".mlp.")
    if names is None or rest not in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        return [entry]
    if rest == "gate.weight":
        return [replace(entry, name=f"{layer}.{names.module}.gate.weight")]
    num_experts, num_rows, num_columns = entry.shape
    parts = (names.gate, names.up) if rest == "experts.gate_up_proj" else (names.down,)
    num_rows //= len(parts)
    whole = _ReadOnce(entry.read, num_uses=num_experts * len(parts))
    return [
        replace(
            entry,
            name=f"{layer}.{names.module}.experts.{expert}.{name}.weight",
            shape=(num_rows, num_columns),
            read=partial(whole.rows, expert, slice(part * num_rows, (part + 1) * num_rows)),
        )
        for expert in range(num_experts)
        for part, name in enumerate(parts)
    ]


class _ReadOnce:
    """A tensor that several entries are cut from: read with the first, dropped with the last."""

    def __init__(self, read: Callable[[], torch.Tensor], *, num_uses: int) -> None:
        self._read = read
        self._num_left = num_uses
        self._tensor: torch.Tensor | None = None

    def rows(self, expert: int, rows: slice) -> torch.Tensor:
        tensor = self._read() if self._tensor is None else self._tensor
        self._num_left -= 1
        self._tensor = tensor if self._num_left else None
        return tensor[expert][rows]


def _loadable_config(spec: ModelSpec, dtype: ExportDtype, end_of_text_id: int | None) -> dict[str, Any]:
    config = {**spec.to_config(), "dtype": _DTYPE_NAMES[dtype], "use_cache": True}
    if end_of_text_id is not None:
        config["eos_token_id"] = end_of_text_id
    return config


def _generation_config(spec: ModelSpec, end_of_text_id: int | None) -> dict[str, Any]:
    """Plain sampling from the model; the end token is the one that parted documents in training."""
    eos = end_of_text_id if end_of_text_id is not None else spec.config["eos_token_id"]
    pad = spec.config["pad_token_id"]
    if pad is None:
        pad = end_of_text_id if end_of_text_id is not None else spec.end_of_text_id
    ids = {"bos_token_id": spec.config["bos_token_id"], "eos_token_id": eos, "pad_token_id": pad}
    ids["decoder_start_token_id"] = spec.config.get("decoder_start_token_id")
    return {"do_sample": True, **{name: value for name, value in ids.items() if value is not None}}


def _write_tokenizer(stage: Path, spec: ModelSpec, tokenizer_file: str | Path, chat_template: str | None) -> int:
    """tokenizer.json as it was, and the smallest tokenizer_config.json that AutoTokenizer understands."""
    loaded = load_tokenizer(
        tokenizer_file, model_vocab_size=spec.vocab_size, end_of_text_id=spec.end_of_text_id
    )
    shutil.copyfile(tokenizer_file, stage / "tokenizer.json")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": loaded.end_of_text,
        "model_max_length": spec.max_sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        config["chat_template"] = chat_template
    _write_json(stage / "tokenizer_config.json", config)
    return loaded.end_of_text_id


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _carry_over(source: str | Path | None, stage: Path, *, leave_out: Sequence[str] = ()) -> set[str]:
    """Copy a model's sidecars, and say which they were; a tokenizer that is written already stays."""
    if source is None:
        return set()
    names = [name for name in sidecar_files(source) if name not in leave_out]
    for name in names:
        if name != TOKENIZER_FILE or not (stage / name).exists():
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / name, stage / name)
    return set(names)


def describe_all(folder: Path) -> list[ExportedFile]:
    return [_describe(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _describe(path: Path, folder: Path) -> ExportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ExportedFile(name=str(path.relative_to(folder)), num_bytes=path.stat().st_size, sha256=digest)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
