"""Puts the parts of a model into its folder: tokenizer, templates, settings, and what a GGUF file holds of them."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.core.files.uploadedfile import UploadedFile

from optimizer.base.errors import InvalidModel
from optimizer.base.serialize import to_json
from optimizer.base.unique_keys import refuse_duplicates
from optimizer.data.chat_facts import read_chat_folder
from optimizer.models.files.check_weights import INDEX_FILE, SINGLE_FILE
from optimizer.models.files.generation_config import read_generation_file
from optimizer.models.files.packed.quantization import KEY, find_quantization
from optimizer.models.files.sidecars import (
    GENERATION_FILE,
    MAX_SIDECAR_BYTES,
    MAX_TEMPLATES,
    TEMPLATES_FOLDER,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    is_sidecar,
)
from optimizer.models.spec import ModelSpec
from webapp.catalog.files.limited import run_limited

MAX_CONFIG_BYTES = 1024 * 1024
CHAT_FILE = "chat.json"
GGUF_FILE = "model.gguf"
GGUF_SUFFIX = ".gguf"
Keep = Callable[["UploadedFile[Any]", Path], None]
_LIMITS_BYTES = {
    TOKENIZER_FILE: MAX_SIDECAR_BYTES,
    TOKENIZER_CONFIG_FILE: 4 * 1024 * 1024,  # it lists added tokens one by one
    GENERATION_FILE: 1024 * 1024,
    "config.json": 1024 * 1024,
    "special_tokens_map.json": 4 * 1024 * 1024,
    "added_tokens.json": 4 * 1024 * 1024,
}
_TEMPLATE_BYTES = 1024 * 1024
_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
_FORM_FIELDS = {TOKENIZER_FILE: "tokenizer", TOKENIZER_CONFIG_FILE: "tokenizer_config"}
_CONVERSION_BYTES = 12 * 1024**3
"""Address space for making a tokenizer of a GGUF file's: transformers, and torch with it, take much and use little."""
_CONVERSION_S = 180.0


def read_config(file: "UploadedFile[Any]") -> Any:
    """The parsed config.json. Raises InvalidModel where it is too large, no JSON, or says something twice."""
    if (file.size or 0) > MAX_CONFIG_BYTES:
        raise InvalidModel(
            f"config.json has {file.size:,} bytes; allowed: at most {MAX_CONFIG_BYTES:,}", field="config", value=file.size
        )
    try:
        return json.loads(file.read(), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"config.json is not JSON: {error}", field="config", allowed="a Hugging Face config.json") from error


def require_gguf(weights: Sequence[str], links: Mapping[str, Path]) -> None:
    """Raise InvalidModel unless the weights are a GGUF file: for a model without a config.json."""
    if [*weights, *links][-1:] != [GGUF_FILE] and not (len(weights) == 1 and weights[0].endswith(GGUF_SUFFIX)):
        raise InvalidModel("config.json is missing; allowed: config.json, or a GGUF file, which holds its own", field="config")


def keep_sidecars(files: "Mapping[str, UploadedFile[Any]]", folder: Path, *, keep: Keep) -> None:
    """Raises InvalidModel for a name that is no part of a model, or a file that is too large."""
    if sum(name.startswith(TEMPLATES_FOLDER) for name in files) > MAX_TEMPLATES:
        raise _refusal(TEMPLATES_FOLDER, f"more than {MAX_TEMPLATES} templates", allowed=f"at most {MAX_TEMPLATES}")
    for name, file in files.items():
        if not is_sidecar(name):
            raise _refusal(name[:80], "no file of a model", allowed="config.json, weights, tokenizer files, *.jinja")
        limit_bytes = sidecar_limit_bytes(name)
        if (file.size or 0) > limit_bytes:
            raise _refusal(name, f"{file.size:,} bytes", allowed=f"at most {limit_bytes:,}")
        (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
        keep(file, folder / name)


def sidecar_limit_bytes(name: str) -> int:
    """Size of the largest file of this name that is kept."""
    return _TEMPLATE_BYTES if name.endswith(".jinja") else _LIMITS_BYTES.get(name, MAX_SIDECAR_BYTES)


def as_sidecars(files: "Iterable[UploadedFile[Any]]") -> "dict[str, UploadedFile[Any]]":
    """By their places in the folder: a form sends names without folders, so every other template is an additional one.

    Raises InvalidModel for two of one name.
    """
    named: dict[str, UploadedFile[Any]] = {}
    for file in files:
        place = _place(file.name or "")
        if place in named:
            raise _refusal(place[:80], "two files of this name", allowed="each name once")
        named[place] = file
    return named


def write_chat(folder: Path, *, otherwise: Path | None) -> bool:
    """Keep how the model writes conversations as chat.json; report whether anything says it.

    otherwise: the chat.json of the model that it was trained from.
    """
    facts = read_chat_folder(folder)
    if facts is not None and (facts.template is not None or otherwise is None):
        (folder / CHAT_FILE).write_text(json.dumps(to_json(facts)))
    elif otherwise is not None:
        (folder / CHAT_FILE).write_bytes(otherwise.read_bytes())
    return facts is not None or otherwise is not None


def write_config(folder: Path, spec: ModelSpec, document: Mapping[str, Any], *, has_weights: bool) -> None:
    """The validated config, with how the weights are packed where there are any. Raises InvalidModel for an unknown packing."""
    config = spec.to_config()
    quantization = find_quantization(document) if has_weights else None
    if quantization is not None:
        config[KEY] = quantization.to_config()
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def generation_document(folder: Path) -> dict[str, Any]:
    """``{"temperature", "top_k", "top_p", "end_ids"}``, those that generation_config.json names. Raises InvalidModel."""
    facts = read_generation_file(folder)
    return {**facts.sampling, **({"end_ids": list(facts.end_ids)} if facts.end_ids else {})}


def check_weights_in(folder: Path, *, owner_id: int | None) -> dict[str, Any]:
    """Facts on the weights, by a limited process; ``config`` among them where they are a GGUF file. Raises InvalidModel."""
    arguments = ["weights", str(folder)]
    return run_limited("webapp.catalog.files.check", arguments, field="weights", error=InvalidModel, owner_id=owner_id)


def check_tokenizer(folder: Path, spec: ModelSpec, *, owner_id: int | None) -> None:
    arguments = ["tokenizer", str(folder / TOKENIZER_FILE)]
    facts = run_limited(
        "webapp.catalog.files.check", arguments, field="tokenizer", error=InvalidModel, owner_id=owner_id, timeout_s=30
    )
    if facts["vocab_size"] > spec.vocab_size:
        raise InvalidModel(
            f"tokenizer.json has {facts['vocab_size']:,} tokens; the model's vocab_size is {spec.vocab_size:,}",
            field="tokenizer",
            value=facts["vocab_size"],
            allowed=f"at most {spec.vocab_size:,} tokens",
        )


def make_tokenizer_of_gguf(folder: Path, *, owner_id: int | None) -> None:
    """Write tokenizer.json and tokenizer_config.json from the GGUF file in the folder. Raises InvalidModel."""
    run_limited(
        "optimizer.models.files.packed.gguf_tokenizer",
        [str(folder)],
        field="weights",
        error=InvalidModel,
        owner_id=owner_id,
        timeout_s=_CONVERSION_S,
        memory_bytes=_CONVERSION_BYTES,
    )


def named_weights(weights: "Sequence[UploadedFile[Any]]") -> "dict[str, UploadedFile[Any]]":
    """By the names that they get in the folder. Raises InvalidModel for two of one name."""
    named: dict[str, UploadedFile[Any]] = {}
    for file in weights:
        name = weights_name(file.name or "", is_only_one=len(weights) == 1)
        if name in named:
            raise InvalidModel(f"two weights files are named {name}; allowed: each name once", field="weights", value=name)
        named[name] = file
    return named


def weights_name(name: str, *, is_only_one: bool) -> str:
    """A name of the sender's is used only when it is a plain one; a single file gets the standard name. Raises InvalidModel."""
    if name == INDEX_FILE:
        return name
    if is_only_one and name.endswith(GGUF_SUFFIX) and "/" not in name:
        return GGUF_FILE
    if _WEIGHTS_NAME.fullmatch(name) is None:
        raise InvalidModel(
            f"weights file is named {name[:80]!r}; allowed: *.safetensors and {INDEX_FILE}, or one *.gguf",
            field="weights",
            value=name[:80],
            allowed=["*.safetensors", INDEX_FILE, "*.gguf"],
            hint="Convert other formats with safetensors; formats that can run code when read are not accepted.",
        )
    return SINGLE_FILE if is_only_one else name


def _place(name: str) -> str:
    is_additional = name.endswith(".jinja") and not is_sidecar(name) and "/" not in name
    return f"{TEMPLATES_FOLDER}/{name}" if is_additional else name


def _refusal(name: str, found: str, *, allowed: str) -> InvalidModel:
    field = _FORM_FIELDS.get(name, "files")
    return InvalidModel(f"{name}: {found}; allowed: {allowed}", field=field, value=found, allowed=allowed)
