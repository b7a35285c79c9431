"""``/me``, ``/models``, ``/datasets``, ``/machines``."""

import json
from typing import Any, TypeVar

from django.db import models, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import File, Form, Router, Schema, UploadedFile

from optimizer.base.errors import InvalidInput
from optimizer.workload import LossOn
from webapp.accounts.access import acting_of
from webapp.api.schemas import ModelRow
from webapp.catalog import actions
from webapp.catalog.documents import dataset_documents, machine_documents, model_document, model_documents
from webapp.catalog.files.model_parts import as_sidecars
from webapp.catalog.hub.download import begin_download
from webapp.catalog.linked import link_model
from webapp.catalog.models import Dataset, Model
from webapp.catalog.preview import preview_samples
from webapp.catalog.queries import (
    datasets_visible_to,
    deleted_datasets_visible_to,
    deleted_models_visible_to,
    machines_visible_to,
    models_visible_to,
)
from webapp.catalog.removal import KEPT, delete_row, restore_row
from webapp.catalog.server_data import create_dataset_of_path
from webapp.catalog.uploads import upload_document
from webapp.clock import iso
from webapp.http.auth import owner_of
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import page_of
from webapp.jobs.fleet import machine_document, machine_links
from webapp.jobs.links.probing import ask_for_links
from webapp.jobs.specs.training import find_visible
from webapp.planning.offers import program_version
from webapp.planning.reach import ask_for_needs, reach_document

router = Router()
R = TypeVar("R", bound=models.Model)


class ModelDetails(ModelRow):
    """With what the model is built of."""

    config: dict[str, Any]
    num_bytes: int
    structure: dict[str, Any]


class ColumnsSaid(Schema):
    """Parts of a sample with the columns that hold them: ``{"prompt": "ask", "completion": "reply"}``; null: as found."""

    columns: dict[str, str] | None


class ModelPage(Schema):
    """Newest first; ``next`` and ``previous`` are whole addresses."""

    results: list[ModelRow]
    next: str | None
    previous: str | None


@router.get("/me", response=dict[str, Any], tags=["account"])
def get_me(request: HttpRequest) -> dict[str, Any]:
    """The owner of the token or session, its rights, and the program's version."""
    acting = acting_of(request.user)
    return {
        "user": request.user.get_username(),
        "is_admin": request.user.is_superuser,
        "scope": acting.scope,
        "project": acting.project_id or None,
        "version": program_version(),
    }


@router.get("/models", response=ModelPage, tags=["models"])
def list_models(request: HttpRequest, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Your models and those that ship with the program, newest first."""
    return page_of(request, models_visible_to(request.user), model_documents)


@router.post("/models", response={201: ModelRow, 202: dict[str, Any]}, tags=["models"])
@idempotent
def create_model(
    request: HttpRequest,
    name: Form[str] = "",
    path: Form[str] = "",
    hub: Form[str] = "",
    seen: Form[str] = "",
    config: File[UploadedFile | None] = None,
    tokenizer: File[UploadedFile | None] = None,
    tokenizer_config: File[UploadedFile | None] = None,
    weights: File[list[UploadedFile] | None] = None,
    files: File[list[UploadedFile] | None] = None,
) -> HttpResponse:
    """A Hugging Face model: config.json, perhaps tokenizer.json and safetensors (one file, or shards with their index), or one
    GGUF file. ``files`` are those beside them: generation_config.json, chat_template.jinja and other templates, added tokens.

    With ``path`` it is a folder on the server below one that an administrator opened; its weights are linked and stay there.
    ``seen`` is a JSON object of some of its files as the sender sees them, ``{name: [bytes, time of change in ns]}``: where the
    server sees others, the path means another machine's folder (``path_differs``).

    With ``hub``, ``owner/name[@revision]``, it is fetched from the Hugging Face hub where an administrator opened it. 202 answers
    with an upload: ``GET /uploads/{id}`` says how far it is, and in ``source`` its end and the model that it became.
    """
    if hub:
        upload = begin_download(owner=owner_of(request), name=name, reference=hub)
        with transaction.atomic():
            return remember(request, status=202, body=upload_document(upload), location=f"/api/v1/uploads/{upload.pk}")
    if path:
        model = link_model(owner=owner_of(request), name=name, path=path, seen=_read_seen(seen))
    else:
        model = actions.create_model(
            owner=owner_of(request),
            name=name,
            config=config,
            tokenizer=tokenizer,
            weights=tuple(weights or ()),
            tokenizer_config=tokenizer_config,
            sidecars=as_sidecars(files or ()),
        )
    location = f"/api/v1/models/{model.pk}"
    with transaction.atomic():
        return remember(request, status=201, body=model_documents([model])[0], location=location)


def _read_seen(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text or "{}")
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidInput("seen is no JSON object", field="seen", allowed="{name: [bytes, time of change in ns]}")
    return document


@router.get("/models/{model_id}", response=ModelDetails, tags=["models"])
def get_model(request: HttpRequest, model_id: str) -> dict[str, Any]:
    return model_document(_one(models_visible_to(request.user), model_id))


@router.get("/models/{model_id}/cards", response=dict[str, Any], tags=["models"])
def get_model_cards(request: HttpRequest, model_id: str) -> dict[str, Any]:
    """On which cards it can be trained or run: each method with its plain and smallest peak, each card with verdicts.

    A method whose profile was never made says ``not_asked``; POST here asks for it.
    """
    return reach_document(_one(models_visible_to(request.user), model_id))


@router.post("/models/{model_id}/cards", response={202: dict[str, Any]}, tags=["models"])
def ask_for_model_cards(request: HttpRequest, model_id: str) -> HttpResponse:
    """Have a worker profile it for every method that is not known; GET reports when that is done."""
    row = _one(models_visible_to(request.user), model_id)
    ask_for_needs(row)
    return JsonResponse(reach_document(row), status=202)


@router.delete("/models/{model_id}", response=dict[str, Any], tags=["models"])
def delete_model(request: HttpRequest, model_id: str) -> dict[str, Any]:
    """Out of sight at once; until ``restorable_until`` it can be had back. 409 for what ships with the program."""
    return _deleted(_one(models_visible_to(request.user), model_id))


@router.post("/models/{model_id}/restore", response=ModelRow, tags=["models"])
def restore_model(request: HttpRequest, model_id: str) -> dict[str, Any]:
    """Have a deleted one back."""
    row = _one(deleted_models_visible_to(request.user), model_id)
    restore_row(row)
    return model_documents([row])[0]


@router.get("/datasets", response=dict[str, Any], tags=["datasets"])
def list_datasets(request: HttpRequest, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Your datasets and those that ship with the program, newest first."""
    return page_of(request, datasets_visible_to(request.user), dataset_documents)


@router.post("/datasets", response={201: dict[str, Any]}, tags=["datasets"])
@idempotent
def create_dataset(
    request: HttpRequest,
    name: Form[str] = "",
    file: File[UploadedFile | None] = None,
    path: Form[str] = "",
    purpose: Form[actions.DatasetPurpose] = "text",
    columns: Form[str] = "",
) -> HttpResponse:
    """Text to train on: .txt, .jsonl, .json, .csv or .parquet with rows. With ``purpose=prompts`` what generate jobs
    continue: .jsonl with ``prompt`` or ``messages``, or lines as OpenAI's Batch API has them.

    ``columns`` says which column holds what, where that is not to be found: ``prompt=ask, completion=reply``, or JSON.

    With ``path`` it is a copy of a file on the server, or of all files of a folder as one, below a folder that an
    administrator opened.
    """
    owner = owner_of(request)
    if (file is None) == (not path):
        raise InvalidInput("a dataset is made of a file or of a path, one of the two", field="file", allowed="file, or path")
    if file is None:
        dataset = create_dataset_of_path(owner=owner, name=name, path=path, columns=columns)
    else:
        dataset = actions.create_dataset(owner=owner, name=name, file=file, purpose=purpose, columns=columns)
    location = f"/api/v1/datasets/{dataset.pk}"
    with transaction.atomic():
        return remember(request, status=201, body=dataset_documents([dataset])[0], location=location)


@router.get("/datasets/{dataset_id}", response=dict[str, Any], tags=["datasets"])
def get_dataset(request: HttpRequest, dataset_id: str) -> dict[str, Any]:
    return dataset_documents([_one(datasets_visible_to(request.user), dataset_id)])[0]


@router.patch("/datasets/{dataset_id}", response=dict[str, Any], tags=["datasets"])
def correct_dataset(request: HttpRequest, dataset_id: str, body: ColumnsSaid) -> dict[str, Any]:
    """Say which column holds what; the file is read anew, and later jobs train on it so. Nothing: as it is found."""
    dataset = _one(datasets_visible_to(request.user), dataset_id)
    actions.correct_columns(dataset, body.columns)
    return dataset_documents([dataset])[0]


@router.get("/datasets/{dataset_id}/preview", response=dict[str, Any], tags=["datasets"])
def preview_dataset(
    request: HttpRequest, dataset_id: str, model: str, sequence_length: int = 512, loss_on: LossOn = "assistant"
) -> dict[str, Any]:
    """Show what training on it would learn with a model (by id or name): samples, the learnt parts, lengths, what is cut.

    Counts are over the first 5,000 samples (``is_whole`` says whether these are all).
    """
    dataset = _one(datasets_visible_to(request.user), dataset_id)
    chosen = find_visible(models_visible_to(request.user), model, field="model")
    return preview_samples(dataset, chosen, sequence_length=sequence_length, loss_on=loss_on)


@router.delete("/datasets/{dataset_id}", response=dict[str, Any], tags=["datasets"])
def delete_dataset(request: HttpRequest, dataset_id: str) -> dict[str, Any]:
    """The same as for a model."""
    return _deleted(_one(datasets_visible_to(request.user), dataset_id))


@router.post("/datasets/{dataset_id}/restore", response=dict[str, Any], tags=["datasets"])
def restore_dataset(request: HttpRequest, dataset_id: str) -> dict[str, Any]:
    """Have a deleted one back."""
    row = _one(deleted_datasets_visible_to(request.user), dataset_id)
    restore_row(row)
    return dataset_documents([row])[0]


@router.get("/machines", response=dict[str, Any], tags=["machines"])
def list_machines(request: HttpRequest, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Machines that have run a worker, and how well their runs were predicted."""
    return page_of(request, machines_visible_to(request.user), machine_documents)


@router.get("/machines/{machine_id}", response=dict[str, Any], tags=["machines"])
def get_machine(request: HttpRequest, machine_id: str) -> dict[str, Any]:
    """One machine, with who holds its device now (``memory``), the network to each other machine as it was measured (``links``),
    and how its latest runs were predicted (``accuracy``).

    Of jobs that are not yours there are bytes and no names.
    """
    return machine_document(request.user, _one(machines_visible_to(request.user), machine_id))


@router.post("/machines/{machine_id}/links", response=dict[str, Any], tags=["machines"])
def measure_links(request: HttpRequest, machine_id: str) -> dict[str, Any]:
    """Have the network to each other machine measured again, as soon as no job is on either; ``links`` as they are now."""
    machine = _one(machines_visible_to(request.user), machine_id)
    ask_for_links(machine)
    return {"links": machine_links(machine)}


def _one(rows: QuerySet[R], key: str) -> R:
    row = rows.filter(pk=key).first()
    if row is None:
        raise Http404
    return row


def _deleted(row: Model | Dataset) -> dict[str, Any]:
    delete_row(row)
    deleted_at = row.deleted_at
    return {
        "id": row.pk,
        "deleted_at": iso(deleted_at),
        "restorable_until": iso(deleted_at + KEPT) if deleted_at is not None else None,
    }
