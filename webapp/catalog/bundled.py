"""Makes rows of what ships with the program; they belong to nobody and everyone sees them. Safe to run again and again."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from django.conf import settings

from optimizer.base.units import parse_bytes
from optimizer.data.bundled import TEXT_FILE, TOKENIZER_FILE
from optimizer.data.inspect import inspect_dataset
from optimizer.models.presets import PRESETS, Preset
from webapp.catalog.models import Dataset, Model
from webapp.ids import new_model_id

DATASET_NAME = "kjv"
EXAMPLE_FILE = Path(__file__).parents[2] / "demo" / "job.yaml"


def ensure_bundled() -> None:
    """One model row for each preset, renewed when its config changed with the program, and the dataset."""
    for preset in PRESETS.values():
        _ensure_preset(preset)
    _ensure_dataset()


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


def _ensure_dataset() -> None:
    with TEXT_FILE.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    row = Dataset.objects.filter(owner__isnull=True, name=DATASET_NAME).first()
    if row is not None and row.sha256 == sha256 and row.file == str(TEXT_FILE) and row.facts:
        return
    facts = inspect_dataset(TEXT_FILE, format="txt")
    Dataset.objects.update_or_create(
        owner=None,
        name=DATASET_NAME,
        defaults={
            "format": "txt",
            "file": str(TEXT_FILE),
            "sha256": sha256,
            "num_bytes": facts.num_bytes,
            "num_documents": facts.num_documents,
            "preview": facts.preview,
            "facts": {key: value for key, value in facts.to_json().items() if key != "preview"},
        },
    )
