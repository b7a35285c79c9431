"""Uploads in pieces: ``POST /uploads``, ``PUT`` piece after piece, ``POST …/finish``; after a cut ``GET`` says where to go on."""

from typing import Any, BinaryIO, Literal, cast

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from ninja import Field, Router, Schema, Status

from webapp.catalog import uploads
from webapp.catalog.documents import dataset_documents, model_documents
from webapp.catalog.models import Model, Upload
from webapp.catalog.queries import uploads_visible_to
from webapp.http.auth import owner_of
from webapp.http.idempotency import idempotent, remember
from webapp.http.paging import page_of

router = Router()


class FileToCome(Schema):
    name: str
    """Without folders: ``config.json``, ``model.safetensors``, ``text.jsonl``; but ``additional_chat_templates/NAME.jinja``."""
    num_bytes: int
    sha256: str = ""
    """In lower-case hex; empty where the sender cannot know it before, whose pieces should then carry theirs."""
    mark: str = ""
    """Anything by which the sender knows this state of the file again; it comes back with the upload."""


class UploadToCome(Schema):
    kind: Literal["model", "dataset"]
    name: str
    files: list[FileToCome] = Field(max_length=uploads.MAX_FILES)
    purpose: Literal["text", "prompts"] = "text"
    columns: str = ""
    """The columns of a dataset by what they hold, where that is not to be found: ``prompt=ask, completion=reply``, or JSON."""


@router.get("/uploads", response=dict[str, Any], tags=["uploads"])
def list_uploads(request: HttpRequest, cursor: str = "", page_size: str = "") -> dict[str, Any]:
    """Yours that are not finished, newest first."""
    return page_of(request, uploads_visible_to(request.user), lambda rows: [uploads.upload_document(row) for row in rows])


@router.post("/uploads", response={201: dict[str, Any]}, tags=["uploads"])
@idempotent
def begin_upload(request: HttpRequest, body: UploadToCome) -> HttpResponse:
    """Announce the files of a model (``config.json`` among them) or the one file of a dataset."""
    with transaction.atomic():
        row = uploads.begin_upload(owner=owner_of(request), **body.dict())
        return remember(request, status=201, body=uploads.upload_document(row), location=f"/api/v1/uploads/{row.pk}")


@router.get("/uploads/{upload_id}", response=dict[str, Any], tags=["uploads"])
def get_upload(request: HttpRequest, upload_id: str) -> dict[str, Any]:
    """The upload with the bytes received of each file (``received_bytes``)."""
    return uploads.upload_document(_get(request, upload_id))


@router.put("/uploads/{upload_id}/files/{number}", response=dict[str, Any], tags=["uploads"])
def add_piece(request: HttpRequest, upload_id: str, number: int, offset: int = 0) -> dict[str, Any]:
    """The body, as it is, is appended to file ``number`` (from 0) at ``offset``, which must be its end: 409 says where that is.

    With ``X-Piece-SHA256`` the piece counts whole or not at all. Pieces of ``piece_bytes`` go well.
    """
    row = _get(request, upload_id)
    if not 0 <= number < len(row.files):
        raise Http404
    received_bytes = uploads.add_piece(
        row,
        number,
        offset_bytes=offset,
        piece=cast(BinaryIO, request),
        sha256=request.headers.get("X-Piece-SHA256", "").lower(),
    )
    return {"number": number, "received_bytes": received_bytes, "num_bytes": row.files[number]["num_bytes"]}


@router.post("/uploads/{upload_id}/finish", response={201: dict[str, Any]}, tags=["uploads"])
@idempotent
def finish_upload(request: HttpRequest, upload_id: str) -> HttpResponse:
    """Check every sha256 and make the model or dataset, which is answered as ``POST /models`` and ``POST /datasets`` answer."""
    made = uploads.finish_upload(_get(request, upload_id))
    if isinstance(made, Model):
        kind, document = "models", model_documents([made])[0]
    else:
        kind, document = "datasets", dataset_documents([made])[0]
    with transaction.atomic():
        return remember(request, status=201, body=document, location=f"/api/v1/{kind}/{made.pk}")


@router.delete("/uploads/{upload_id}", response={204: None}, tags=["uploads"])
def drop_upload(request: HttpRequest, upload_id: str) -> Status[None]:
    """Give it up; what came of it is removed. One that is left alone goes after a day."""
    uploads.drop_upload(_get(request, upload_id))
    return Status(204, None)


def _get(request: HttpRequest, upload_id: str) -> Upload:
    row = uploads_visible_to(request.user).filter(pk=upload_id).first()
    if row is None:
        raise Http404
    return row
