"""Models, datasets and machines as the API shows them. Every key is listed; nothing leaks by default."""

from datetime import timedelta
from typing import Any

from django.utils import timezone

from optimizer.base.serialize import to_json
from optimizer.models.spec import read_model_spec
from optimizer.models.structure import describe_structure
from webapp.catalog.actions import files_bytes
from webapp.catalog.models import Dataset, Machine, Model
from webapp.catalog.queries import profile_states
from webapp.clock import iso

ONLINE_WITHIN = timedelta(seconds=30)
"""Workers show themselves every few seconds."""


def model_documents(models: list[Model]) -> list[dict[str, Any]]:
    states = profile_states(models)
    return [
        {
            "id": model.pk,
            "name": model.name,
            "project": model.project_id,
            "preset": model.preset,
            "model_type": model.model_type,
            "num_parameters": model.num_parameters,
            "has_weights": model.has_weights,
            "has_tokenizer": model.has_tokenizer,
            "has_chat": model.has_chat,
            "unread": model.unread,
            "from_job": model.from_job_id or None,
            "linked_from": model.linked_from or None,
            "generation": model.generation,
            "created_at": iso(model.created_at),
            "profile": states[model.fingerprint],
        }
        for model in models
    ]


def model_document(model: Model) -> dict[str, Any]:
    """A row of the list, with what the model is built of."""
    structure = to_json(describe_structure(read_model_spec(model.config)))
    return {**model_documents([model])[0], "config": model.config, "num_bytes": files_bytes(model), "structure": structure}


def dataset_documents(datasets: list[Dataset]) -> list[dict[str, Any]]:
    return [
        {
            "id": dataset.pk,
            "name": dataset.name,
            "project": dataset.project_id,
            "format": dataset.format,
            "columns": dataset.columns,
            "num_bytes": dataset.num_bytes,
            "num_documents": dataset.num_documents,
            "preview": dataset.preview,
            "sha256": dataset.sha256,
            "facts": dataset.facts,
            "created_at": iso(dataset.created_at),
        }
        for dataset in datasets
    ]


def machine_documents(machines: list[Machine]) -> list[dict[str, Any]]:
    return [
        {
            "id": machine.pk,
            "name": machine.name,
            "device": machine.document.get("device"),
            "num_devices": machine.document.get("num_devices", 1),
            "others": [
                {"device": kind["device"], "num_devices": kind.get("num_devices", 1)}
                for kind in machine.document.get("others") or ()
            ],
            "peers": machine.document.get("peers"),
            "last_seen_at": iso(machine.last_seen_at),
            "online": timezone.now() - machine.last_seen_at < ONLINE_WITHIN,
            "draining": machine.draining,
            "calibration": machine.calibration,
        }
        for machine in machines
    ]
