"""``/v1/files``, ``/v1/batches`` and ``/v1/models``, after OpenAI's API, so that its clients work here unchanged.

https://platform.openai.com/docs/api-reference/batch, .../files. Not offered: uploads for other purposes, expiry of files.
"""

from typing import Annotated, Any, Literal, TypeVar

from django.db.models import Model as Row
from django.db.models import QuerySet
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from ninja import File, Form, Query, Router, Schema, UploadedFile
from pydantic import Field

from webapp.accounts.audit import note_target
from webapp.batches import actions
from webapp.batches.answers import RequestRefused
from webapp.batches.documents import batch_document, file_document, model_document, tuned_document
from webapp.batches.models import Batch, BatchFile
from webapp.batches.queries import batches_visible_to, files_visible_to
from webapp.catalog.queries import models_visible_to
from webapp.http.auth import owner_of
from webapp.http.streaming import stream_file
from webapp.serving.names import tuned_runs

router = Router()
R = TypeVar("R", bound=Row)
Document = dict[str, Any]


class BatchRequest(Schema, extra="forbid"):
    """A request for a batch; the model is named in the lines' bodies."""

    input_file_id: str = Field(max_length=100)
    endpoint: str = Field(max_length=100)
    completion_window: str = Field(max_length=20)
    metadata: dict[str, Any] | None = None


@router.post("/files", response=Document)
def create_file(request: HttpRequest, purpose: Form[str], file: File[UploadedFile]) -> Document:
    """Upload requests, one JSON object a line, with ``purpose=batch``."""
    made = actions.upload_file(owner=owner_of(request), file=file, purpose=purpose)
    note_target(request, made.pk)
    return file_document(made)


@router.get("/files", response=Document)
def list_files(
    request: HttpRequest,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str = "",
) -> Document:
    rows = files_visible_to(request.user)
    if purpose:
        rows = rows.filter(purpose=purpose)
    page, has_more = _page(rows, after=after, limit=limit, is_rising=order == "asc")
    return _list([file_document(row) for row in page], has_more=has_more)


@router.get("/files/{file_id}", response=Document)
def get_file(request: HttpRequest, file_id: str) -> Document:
    return file_document(_file(request, file_id))


@router.delete("/files/{file_id}", response=Document)
def delete_file(request: HttpRequest, file_id: str) -> Document:
    """A batch that runs keeps its lines."""
    actions.delete_file(_file(request, file_id))
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/files/{file_id}/content")
def get_file_content(request: HttpRequest, file_id: str) -> HttpResponseBase:
    file = _file(request, file_id)
    found = file.dataset or file.artifact
    if found is None:
        raise Http404("file")
    return stream_file(found.file, name=file.filename, sha256=found.sha256)


@router.post("/batches", response=Document)
def create_batch(request: HttpRequest, body: BatchRequest) -> Document:
    """It is validated, priced and started by itself; poll it."""
    batch = actions.create_batch(
        owner_of(request),
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    note_target(request, batch.pk)
    return batch_document(batch)


@router.get("/batches", response=Document)
def list_batches(
    request: HttpRequest, after: str = "", limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Document:
    page, has_more = _page(batches_visible_to(request.user), after=after, limit=limit)
    return _list([_followed(row) for row in page], has_more=has_more)


@router.get("/batches/{batch_id}", response=Document)
def get_batch(request: HttpRequest, batch_id: str) -> Document:
    return _followed(_batch(request, batch_id))


@router.post("/batches/{batch_id}/cancel", response=Document)
def cancel_batch(request: HttpRequest, batch_id: str) -> Document:
    """Cancel a batch; lines finished by then are in the output file."""
    batch = _batch(request, batch_id)
    if not actions.cancel_batch(batch):
        message = f"batch {batch.pk} is {batch.status}; it cannot be cancelled"
        raise RequestRefused(message, status=409, code="wrong_state")
    return batch_document(batch)


@router.get("/models", response=Document)
def list_models(request: HttpRequest) -> Document:
    """Those that can generate: with weights, and what finished runs left of theirs."""
    rows = models_visible_to(request.user).filter(has_weights=True).select_related("owner")
    tuned = [tuned_document(run) for run in tuned_runs(request.user)]
    return _list([*(model_document(row) for row in rows), *tuned], has_more=False)


def _followed(batch: Batch) -> Document:
    actions.follow_job(batch)
    return batch_document(batch)


def _file(request: HttpRequest, file_id: str) -> BatchFile:
    row = files_visible_to(request.user).select_related("dataset", "artifact").filter(pk=file_id).first()
    if row is None:
        raise Http404("file")
    return row


def _batch(request: HttpRequest, batch_id: str) -> Batch:
    row = batches_visible_to(request.user).filter(pk=batch_id).first()
    if row is None:
        raise Http404("batch")
    return row


def _page(rows: "QuerySet[R]", *, after: str, limit: int, is_rising: bool = False) -> tuple[list[R], bool]:
    """Newest first unless rising. Ids sort by creation."""
    if after:
        rows = rows.filter(pk__gt=after) if is_rising else rows.filter(pk__lt=after)
    found = list(rows.order_by("pk" if is_rising else "-pk")[: limit + 1])
    return found[:limit], len(found) > limit


def _list(documents: list[Document], *, has_more: bool) -> Document:
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else None,
        "last_id": documents[-1]["id"] if documents else None,
        "has_more": has_more,
    }
