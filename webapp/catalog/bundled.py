"""Makes rows of what ships with the program; they belong to nobody and everyone sees them. Safe to run again and again."""

import filecmp
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from django.conf import settings

from optimizer.base.units import parse_bytes
from optimizer.data.bundled import CHATS_FILE, TEXT_FILE, TOKENIZER_FILE
from optimizer.data.documents import DatasetFormat
from optimizer.data.inspect import inspect_dataset
from optimizer.models.bundled import CHAT_MODEL_FOLDER, CHAT_MODEL_NAME
from optimizer.models.presets import PRESETS, Preset
from optimizer.models.spec import read_model_spec
from webapp.catalog.files.model_parts import generation_document, write_chat
from webapp.catalog.models import Dataset, Model
from webapp.ids import new_model_id

DATASETS: tuple[tuple[str, Path, DatasetFormat], ...] = (("kjv", TEXT_FILE, "txt"), ("kjv-chats", CHATS_FILE, "jsonl"))
WEIGHTS_FILE = "model.safetensors"
EXAMPLE_FILE = Path(__file__).parents[2] / "demo" / "job.yaml"


def ensure_bundled() -> None:
    """A model row for each preset, renewed when its config changed with the program, the chat model, and the datasets."""
    for preset in PRESETS.values():
        _ensure_preset(preset)
    _ensure_chat_model()
    for name, file, format in DATASETS:
        _ensure_dataset(name, file, format=format)


def example_spec() -> dict[str, Any] | None:
    """The demo's job as a spec with ids; None where its model or its dataset is not there."""
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE_FILE.read_text())
    model = Model.objects.filter(preset=spec["model"]).values_list("pk", flat=True).first()
    dataset = Dataset.objects.filter(owner__isnull=True, name=spec["dataset"]).values_list("pk", flat=True).first()
    if model is None or dataset is None:
        return None
    budget_bytes = parse_bytes(spec["goal"]["device_budget_bytes"])
    return {**spec, "model": model, "dataset": dataset, "goal": {**spec["goal"], "device_budget_bytes": budget_bytes}}


def _ensure_preset(preset: Preset) -> None:
    spec = preset.spec
    row = Model.objects.filter(preset=preset.name).first()
    if row is not None and row.fingerprint == spec.fingerprint:
        return
    model_id = row.pk if row else new_model_id()
    folder = Path(settings.HEADROOM_HOME) / "models" / model_id
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec.to_config(), indent=1))
    if preset.has_tokenizer:
        shutil.copyfile(TOKENIZER_FILE, folder / "tokenizer.json")
    values = {
        "owner": None,
        "name": preset.name,
        "model_type": spec.model_type,
        "config": spec.to_config(),
        "fingerprint": spec.fingerprint,
        "folder": f"models/{model_id}",
        "has_tokenizer": preset.has_tokenizer,
        "num_parameters": spec.num_parameters,
    }
    Model.objects.update_or_create(preset=preset.name, defaults=values, create_defaults={"id": model_id, **values})


def _ensure_chat_model() -> None:
    """The one bundled model that has weights, with a folder like those of uploaded models."""
    config = json.loads((CHAT_MODEL_FOLDER / "config.json").read_text())
    spec = read_model_spec(config)
    row = Model.objects.filter(preset=CHAT_MODEL_NAME).first()
    model_id = row.pk if row else new_model_id()
    folder = Path(settings.HEADROOM_HOME) / "models" / model_id
    is_same = _is_same(folder / WEIGHTS_FILE, CHAT_MODEL_FOLDER / WEIGHTS_FILE)
    if row is not None and row.fingerprint == spec.fingerprint and is_same:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in CHAT_MODEL_FOLDER.iterdir():
        shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(spec.to_config(), indent=1))
    values = {
        "owner": None,
        "name": CHAT_MODEL_NAME,
        "model_type": spec.model_type,
        "config": spec.to_config(),
        "fingerprint": spec.fingerprint,
        "folder": f"models/{model_id}",
        "has_weights": True,
        "has_tokenizer": True,
        "has_chat": write_chat(folder, otherwise=None),
        "generation": generation_document(folder),
        "num_parameters": spec.num_parameters,
    }
    Model.objects.update_or_create(preset=CHAT_MODEL_NAME, defaults=values, create_defaults={"id": model_id, **values})


def _is_same(first: Path, second: Path) -> bool:
    return first.is_file() and filecmp.cmp(first, second, shallow=False)


def _ensure_dataset(name: str, path: Path, *, format: DatasetFormat) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    row = Dataset.objects.filter(owner__isnull=True, name=name).first()
    if row is not None and row.sha256 == sha256 and row.file == str(path) and row.facts:
        return
    facts = inspect_dataset(path, format=format)
    Dataset.objects.update_or_create(
        owner=None,
        name=name,
        defaults={
            "format": format,
            "file": str(path),
            "sha256": sha256,
            "num_bytes": facts.num_bytes,
            "num_documents": facts.num_documents,
            "preview": facts.preview,
            "facts": {key: value for key, value in facts.to_json().items() if key != "preview"},
        },
    )
