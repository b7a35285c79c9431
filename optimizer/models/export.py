"""Writes a trained model as a folder that ``AutoModelForCausalLM.from_pretrained`` loads without this program.

The folder appears complete or not at all; each file comes back with its size and sha256. Tied weights are written once, and
experts under the names that published checkpoints use (transformers' own ``save_pretrained`` sees to both).
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from optimizer.data.tokenizer import load_tokenizer
from optimizer.errors import DiskFull
from optimizer.models.build import go_offline
from optimizer.models.spec import ModelSpec

ExportDtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[ExportDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE_NAMES: dict[ExportDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file of an exported folder."""

    name: str
    num_bytes: int
    sha256: str


def export_model(
    model: nn.Module,
    spec: ModelSpec,
    *,
    folder: str | Path,
    dtype: ExportDtype = "fp32",
    tokenizer_file: str | Path | None = None,
    chat_template: str | None = None,
) -> list[ExportedFile]:
    """Write config.json, generation_config.json, model.safetensors and, where given, the tokenizer, into a new ``folder``.

    The model is only read; its weights may be on any device, and one copy of them in ``dtype`` is held on the host meanwhile.
    tokenizer_file: the tokenizer the model was trained with, the bundled one included.
    Raises FileExistsError where ``folder`` exists, DiskFull.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; export writes a new folder")
    stage = folder.with_name(f".{folder.name}.stage")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        end_of_text_id = _write_tokenizer(stage, spec, tokenizer_file, chat_template) if tokenizer_file else None
        _write_weights(stage, model, dtype)
        _write_json(stage / "config.json", _loadable_config(spec, dtype, end_of_text_id))
        _write_json(stage / "generation_config.json", _generation_config(spec, end_of_text_id))
        files = [_describe(path) for path in sorted(stage.iterdir())]
        _sync((*stage.iterdir(), stage))
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
    return files


def _write_weights(stage: Path, model: nn.Module, dtype: ExportDtype) -> None:
    go_offline()
    converted: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # One copy per parameter, so that tied names stay tied and are written once.
        if id(tensor) not in converted:
            target = _DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
            converted[id(tensor)] = tensor.detach().to(device="cpu", dtype=target).contiguous()
        state[name] = converted[id(tensor)]
    model.save_pretrained(stage, state_dict=state, max_shard_size="10TB")  # type: ignore[operator]


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


def _describe(path: Path) -> ExportedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ExportedFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
