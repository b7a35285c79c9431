"""An upload as a stranger sends it, and what the service's own checks say of it, without rows and without a process of its own.

``examine`` goes the way of ``webapp/catalog/actions.py``: the same functions in the same order, up to the row.
What is allowed is then read by the libraries that jobs read it with: what they cannot read was wrongly allowed. Call it in a
process that may die.
"""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from django.core.files.uploadedfile import SimpleUploadedFile

from optimizer.base.errors import InvalidDataset, InvalidInput
from optimizer.data.samples.records import ROW_FORMATS, read_records
from optimizer.models.spec import read_model_spec
from optimizer.models.unread import describe_unread
from webapp.catalog.files import limited, model_parts

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of a form."""

    field: str
    """config, tokenizer, tokenizer_config, weights or files of a model; file of a dataset; prompts."""
    name: str
    content: bytes

    def as_sent(self) -> SimpleUploadedFile:
        return SimpleUploadedFile(self.name, self.content)


Upload = tuple[Part, ...]


class WronglyAllowedError(Exception):
    """The service took what no job can read."""


def examine(upload: Upload, folder: Path, *, is_bomb: bool = False) -> None:
    """Raises InvalidInput for what is refused, WronglyAllowedError; anything else that it raises is a fault of the service.

    is_bomb: its checks run as the service runs them, in limited processes.
    """
    with contextlib.nullcontext() if is_bomb else checks_here():
        if upload[0].field in ("file", "prompts"):
            _examine_dataset(upload[0], folder)
        else:
            _examine_model(upload, folder)


@contextlib.contextmanager
def checks_here() -> Iterator[None]:
    """Checks run in this process, and so within its limits alone."""
    with contextlib.ExitStack() as patched:
        for module in (limited, model_parts, *_loaded("webapp.catalog.actions")):
            patched.enter_context(mock.patch.object(module, "run_limited", _run_here))
        for name in ("inspect", "inspect_prompts"):
            module = importlib.import_module(f"optimizer.data.{name}")
            patched.enter_context(mock.patch.object(module, "limit_process"))
        yield


def _loaded(name: str) -> Sequence[Any]:
    return [sys.modules[name]] if name in sys.modules else []


def _run_here(
    module: str, arguments: Sequence[str], *, field: str, error: type[InvalidInput], **limits: Any
) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exit_code = importlib.import_module(module).main(list(arguments))
    return limited._read(printed.getvalue().encode(), exit_code=exit_code, field=field, error=error)


def _examine_model(upload: Upload, folder: Path) -> None:
    sent = {part.field: part.as_sent() for part in upload if part.field not in ("weights", "files")}
    config = sent.get("config")
    document = None if config is None else model_parts.read_config(config)
    spec = None if config is None else read_model_spec(document)
    if config is None:
        model_parts.require_gguf([part.name for part in upload if part.field == "weights"], {})
    beside = {"tokenizer.json": sent.get("tokenizer"), "tokenizer_config.json": sent.get("tokenizer_config")}
    beside |= model_parts.as_sidecars([part.as_sent() for part in upload if part.field == "files"])
    model_parts.keep_sidecars({name: file for name, file in beside.items() if file is not None}, folder, keep=_keep)
    weights = [part.as_sent() for part in upload if part.field == "weights"]
    for name, file in model_parts.named_weights(weights).items():
        _keep(file, folder / name)
    if spec is not None:
        model_parts.write_config(folder, spec, document, has_weights=bool(weights))
    if weights:
        found = model_parts.check_weights_in(folder, owner_id=None)
        if spec is None:
            document = found["config"]
            spec = read_model_spec(document)
    assert spec is not None
    describe_unread(document, spec)
    if (folder / "tokenizer.json").exists():
        model_parts.check_tokenizer(folder, spec, owner_id=None)
    model_parts.generation_document(folder)
    model_parts.write_chat(folder, otherwise=None)
    _read_again(spec, folder)


def _keep(file: Any, path: Path) -> None:
    path.write_bytes(file.read())


def _read_again(spec: Any, folder: Path) -> None:
    """By safetensors and by the spec's own reader."""
    from safetensors import safe_open

    again = read_model_spec(json.loads(json.dumps(spec.to_config())))
    _require(again == spec, "the spec that was written is read as another one")
    _require(0 < spec.num_parameters < 10**15, "the model has no sensible number of parameters")
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no dict)
                    opened.get_slice(name).get_shape()
        except Exception as error:
            raise WronglyAllowedError(f"{file.name}: safetensors cannot read it: {error}") from error


def _examine_dataset(part: Part, folder: Path) -> None:
    suffix = Path(part.name).suffix.lower()
    if part.field == "prompts":
        path = folder / "prompts.jsonl"
        path.write_bytes(part.content)
        facts = _inspect("optimizer.data.inspect_prompts", [str(path)])
        _require(facts["num_prompts"] > 0, "the file holds no prompt")
        _require(facts["num_refused"] == sum(facts["refused_by_code"].values()), "a refused line has no reason")
        return
    if suffix not in FORMATS:
        raise InvalidDataset(f"file is named {part.name[:80]!r}", field="file")
    path, format = folder / f"data{suffix}", FORMATS[suffix]
    path.write_bytes(part.content)
    facts = _inspect("optimizer.data.inspect", [str(path), "--format", format])
    json.dumps(facts).encode()
    _require(facts["num_characters"] > 0, "the dataset holds no text")
    if format in ROW_FORMATS:
        records = sum(1 for _ in read_records(path, format=format))
        _require(records == facts["num_documents"], "a job reads another number of records")
    else:
        part.content.decode("utf-8")


def _inspect(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = limited.run_limited(module, arguments, field="file", error=InvalidDataset, owner_id=None)["facts"]
    return found


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise WronglyAllowedError(otherwise)
