"""Uploads in pieces: each survives a cut, and nothing becomes a model or dataset whose bytes are not those that were announced.

How much of a file is here is the length of what is here, so there is nothing that could say otherwise after a crash. Pieces lie
under ``uploads/<id>/<number>``; ``finish_upload`` hands them on as if they had come at once (``actions.py``), and what is then
refused can be corrected only by a new upload. Those that nothing comes for are removed after a day.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.utils import timezone

from optimizer.base.errors import DiskFull, InvalidInput
from optimizer.data.samples.columns import read_columns
from optimizer.models.files.sidecars import is_sidecar
from webapp.accounts.access import act_in, project_for_new, require_role
from webapp.accounts.models import Role
from webapp.catalog.actions import DatasetPurpose, checked_name, create_dataset, create_model
from webapp.catalog.errors import CatalogConflict, WrongOffset
from webapp.catalog.files.kept_file import KeptFile
from webapp.catalog.files.model_parts import GGUF_SUFFIX
from webapp.catalog.files.room import require_floor, require_room
from webapp.catalog.files.stored import lock_stored, require_stored_room
from webapp.catalog.models import Dataset, Model, Upload

PIECE_BYTES = 8 * 1024 * 1024
"""Size of the pieces that clients are asked to send."""
MAX_PIECE_BYTES = 2 * PIECE_BYTES
MAX_FILES = 1_100
"""A model may have 1,000 shards."""
MAX_OPEN = 20
"""Uploads of one person."""
KEPT = timedelta(days=1)
"""Since the last piece."""
_SHOWN_OF_SOURCE = ("hub", "revision", "commit", "state", "message", "model")
_READ_BYTES = 1024 * 1024
_MODEL_PARTS = {"config.json": "config", "tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer_config"}


def begin_upload(
    *,
    owner: User,
    kind: str,
    name: str,
    files: Sequence[dict[str, Any]],
    purpose: str = "text",
    source: dict[str, Any] | None = None,
    columns: str = "",
) -> Upload:
    """files: ``{"name", "num_bytes", "sha256", "mark"}`` each. Raises InvalidInput for the first that is wrong,
    CatalogConflict past a limit, DiskFull.

    sha256: of the whole file, empty where the sender cannot know it before (a browser); its pieces then carry theirs.
    mark: what the sender knows this state of the file by, such as the time of its last change. columns: of a dataset.
    """
    if kind not in ("model", "dataset"):
        raise _refusal("kind", kind, allowed=["model", "dataset"])
    if purpose not in ("text", "prompts"):
        raise _refusal("purpose", purpose, allowed=["text", "prompts"])
    if not 1 <= len(files) <= MAX_FILES or (kind == "dataset" and len(files) != 1):
        raise _refusal("files", len(files), allowed="one file" if kind == "dataset" else f"1 to {MAX_FILES} files")
    read = [_read_file(number, file) for number, file in enumerate(files)]
    _check_together(kind, read)
    read_columns(columns)
    source = source or ({"columns": columns} if columns else {})
    with transaction.atomic():
        lock_stored(owner, project_for_new(owner))  # two that begin at the same moment must not pass a limit together
        _check_open(owner, num_bytes=_announced_bytes(read))
        require_stored_room(owner, _announced_bytes(read), open_bytes=_still_to_come)
        return Upload.objects.create(owner=owner, kind=kind, name=checked_name(name), purpose=purpose, files=read, source=source)


def _check_open(owner: User, *, num_bytes: int) -> None:
    """Raises CatalogConflict for a person whose unfinished uploads are as many, or announce as much, as is allowed."""
    unfinished = [upload for upload in Upload.objects.filter(owner=owner) if not is_over(upload)]
    hint = "Finish or delete one; see GET /api/v1/uploads."
    if len(unfinished) >= MAX_OPEN:
        raise CatalogConflict(f"{MAX_OPEN} uploads of yours are open", hint=hint)
    open_bytes = sum(_announced_bytes(upload.files) for upload in unfinished)
    limit_bytes = int(settings.HEADROOM_MAX_OPEN_UPLOAD_BYTES)
    if limit_bytes and open_bytes + num_bytes > limit_bytes:
        raise CatalogConflict(
            f"this upload has {num_bytes:,} bytes and your unfinished ones {open_bytes:,}; allowed: {limit_bytes:,} together",
            hint=hint if unfinished else "An administrator can allow more by HEADROOM_MAX_OPEN_UPLOAD_BYTES.",
        )


def _still_to_come(upload: Upload) -> int:
    return 0 if is_over(upload) else _announced_bytes(upload.files)


def _announced_bytes(files: Sequence[dict[str, Any]]) -> int:
    return sum(file["num_bytes"] for file in files)


def add_piece(upload: Upload, number: int, *, offset_bytes: int, piece: BinaryIO, sha256: str = "") -> int:
    """Append to a file; how many of its bytes are here then. A piece counts whole or not at all.

    Raises WrongOffset, CatalogConflict for an upload that has ended, InvalidInput for a piece that is too long or not what it
    should be, and DiskFull.
    """
    file = upload.files[number]
    if is_over(upload):
        raise _ended(upload)
    require_floor()
    with _opened(upload, number) as out:
        received_bytes = out.seek(0, os.SEEK_END)
        if offset_bytes != received_bytes:
            raise WrongOffset(file["name"], sent_at=offset_bytes, received_bytes=received_bytes)
        try:
            _append(out, piece, room_bytes=min(MAX_PIECE_BYTES, file["num_bytes"] - received_bytes), sha256=sha256)
        except BaseException:
            out.truncate(received_bytes)
            raise
        end_bytes = out.seek(0, os.SEEK_END)
    if not Upload.objects.filter(pk=upload.pk).update(updated_at=timezone.now()):
        drop_pieces(upload)
        raise _ended(upload)
    return end_bytes


def _ended(upload: Upload) -> CatalogConflict:
    return CatalogConflict(f"the upload of {upload.name} was finished or given up", hint="Begin another one.")


def received_bytes(upload: Upload, number: int) -> int:
    try:
        return piece_path(upload, number).stat().st_size
    except FileNotFoundError:
        return 0


def is_over(upload: Upload) -> bool:
    """Report whether it is a download that has come to its end, of which only the row is left."""
    return upload.source.get("state") in ("done", "failed")


def finish_upload(upload: Upload, *, keeps_row: bool = False) -> Model | Dataset:
    """The row that it becomes; the pieces are then gone, and the upload's row unless it is kept.

    Raises CatalogConflict while bytes are missing, InvalidInput for a file whose sha256 is another one, which must then be sent
    again from its start, and what ``create_model`` and ``create_dataset`` raise.
    """
    if upload.project_id is not None:  # whoever began it may have lost the role since
        require_role(upload.owner, upload.project_id, Role.MEMBER)
    for number, file in enumerate(upload.files):
        here_bytes = received_bytes(upload, number)
        if here_bytes != file["num_bytes"]:
            raise CatalogConflict(
                f"{file['name']} is not complete: {here_bytes:,} of {file['num_bytes']:,} bytes are here",
                hint=f"Go on at byte {here_bytes}.",
            )
        _check_sha256(upload, number)
    opened = [_as_uploaded(upload, number) for number in range(len(upload.files))]
    try:
        row = _create_model(upload, opened) if upload.kind == "model" else _create_dataset(upload, opened[0])
    finally:
        for file in opened:
            file.close()
    drop_pieces(upload) if keeps_row else drop_upload(upload)
    return row


def drop_upload(upload: Upload) -> None:
    Upload.objects.filter(pk=upload.pk).delete()
    drop_pieces(upload)


def drop_pieces(upload: Upload) -> None:
    shutil.rmtree(_folder(upload), ignore_errors=True)


def drop_abandoned() -> list[str]:
    """Those for which nothing has come for KEPT; their ids."""
    rows = list(Upload.objects.filter(updated_at__lt=timezone.now() - KEPT))
    for row in rows:
        drop_upload(row)
    return [row.pk for row in rows]


def upload_document(upload: Upload) -> dict[str, Any]:
    files = [
        {**file, "received_bytes": received_bytes(upload, number)} for number, file in enumerate(upload.files)
    ]
    return {
        "id": upload.pk,
        "kind": upload.kind,
        "name": upload.name,
        "purpose": upload.purpose,
        "columns": upload.source.get("columns", ""),
        "files": files,
        "piece_bytes": PIECE_BYTES,
        "max_piece_bytes": MAX_PIECE_BYTES,
        "source": {key: upload.source[key] for key in _SHOWN_OF_SOURCE if key in upload.source} or None,
        "kept_until": (upload.updated_at + KEPT).isoformat().replace("+00:00", "Z"),
    }


def _read_file(number: int, file: dict[str, Any]) -> dict[str, Any]:
    where = f"files.{number}"
    name, num_bytes, sha256, mark = (file.get(key, "") for key in ("name", "num_bytes", "sha256", "mark"))
    is_plain = isinstance(name, str) and (Path(name).name == name or is_sidecar(name))
    if not is_plain or not 0 < len(name) <= 200 or not name.isprintable():
        raise _refusal(f"{where}.name", name, allowed="a file's name without folders")
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or num_bytes < 0:
        raise _refusal(f"{where}.num_bytes", num_bytes, allowed="a whole number from 0")
    if not isinstance(sha256, str) or len(sha256) not in (0, 64) or not set(sha256) <= set("0123456789abcdef"):
        raise _refusal(f"{where}.sha256", sha256, allowed="64 lower-case hex digits, or none")
    if not isinstance(mark, str) or len(mark) > 100 or not mark.isprintable():
        raise _refusal(f"{where}.mark", mark, allowed="at most 100 printable characters")
    return {"name": name, "num_bytes": num_bytes, "sha256": sha256, **({"mark": mark} if mark else {})}


def _check_together(kind: str, files: Sequence[dict[str, Any]]) -> None:
    names = [file["name"] for file in files]
    if len(set(names)) != len(names):
        raise _refusal("files", names, allowed="each name once")
    if kind == "model" and "config.json" not in names and not any(name.endswith(GGUF_SUFFIX) for name in names):
        raise _refusal("files", names, allowed="config.json or a GGUF file among them")
    total_bytes, limit_bytes = _announced_bytes(files), int(settings.HEADROOM_MAX_UPLOAD_BYTES)
    if limit_bytes and total_bytes > limit_bytes:
        raise InvalidInput(
            f"the files have {total_bytes:,} bytes; allowed: at most {limit_bytes:,}",
            field="files",
            value=total_bytes,
            allowed={"maximum": limit_bytes},
        )
    require_room(total_bytes, promised_bytes=_promised_bytes())


def _promised_bytes() -> int:
    """Bytes that open uploads, of anybody, announced and that are not here yet."""
    waiting = 0
    for upload in Upload.objects.all():
        if is_over(upload):
            continue
        waiting += sum(max(0, file["num_bytes"] - received_bytes(upload, number)) for number, file in enumerate(upload.files))
    return waiting


def _append(out: BinaryIO, piece: BinaryIO, *, room_bytes: int, sha256: str) -> None:
    digest, num_bytes = hashlib.sha256(), 0
    try:
        while block := piece.read(_READ_BYTES):
            num_bytes += len(block)
            if num_bytes > room_bytes:
                raise _refusal("piece", num_bytes, allowed=f"at most {room_bytes:,} bytes: no more were announced or go at once")
            digest.update(block)
            out.write(block)
        out.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull("the piece could not be kept: the disk is full", hint="Free some disk space and go on.") from error
    if sha256 and digest.hexdigest() != sha256:
        raise _refusal("sha256", digest.hexdigest(), allowed=f"the sha256 that was sent with the piece, {sha256}")


@contextmanager
def _opened(upload: Upload, number: int) -> Iterator[BinaryIO]:
    """For this sender alone: a cut connection's request may still be writing when the next one comes."""
    with (make_folder(upload) / str(number)).open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CatalogConflict(
                f"another piece of {upload.files[number]['name']} is being received", hint="Ask again in a moment."
            ) from None
        yield out


def _check_sha256(upload: Upload, number: int) -> None:
    file, path = upload.files[number], piece_path(upload, number)
    if not path.exists():  # an empty file of which no piece ever came
        (make_folder(upload) / str(number)).touch()
    if not file["sha256"]:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != file["sha256"]:
        path.unlink()
        raise InvalidInput(
            f"what came of {file['name']} has sha256 {found}; announced was {file['sha256']}",
            field=f"files.{number}.sha256",
            value=found,
            allowed=file["sha256"],
            hint="It must be sent again from its start.",
        )


def _as_uploaded(upload: Upload, number: int) -> "UploadedFile[Any]":
    return KeptFile(piece_path(upload, number), name=upload.files[number]["name"])


def _create_model(upload: Upload, files: "Sequence[UploadedFile[Any]]") -> Model:
    parts: dict[str, Any] = {"config": None}
    parts |= {_MODEL_PARTS[str(file.name)]: file for file in files if file.name in _MODEL_PARTS}
    # UploadedFile keeps the last part of a name alone
    named = [(entry["name"], file) for entry, file in zip(upload.files, files, strict=True) if entry["name"] not in _MODEL_PARTS]
    sidecars = {name: file for name, file in named if is_sidecar(name)}
    weights = [file for name, file in named if name not in sidecars]
    return create_model(owner=_owner(upload), name=upload.name, weights=weights, sidecars=sidecars, **parts)


def _create_dataset(upload: Upload, file: "UploadedFile[Any]") -> Dataset:
    purpose: DatasetPurpose = "prompts" if upload.purpose == "prompts" else "text"
    columns = upload.source.get("columns")
    return create_dataset(owner=_owner(upload), name=upload.name, file=file, purpose=purpose, columns=columns)


def _owner(upload: Upload) -> User:
    """At work in the project where the upload was begun, so that what it becomes goes there."""
    return act_in(upload.owner, upload.project)


def _folder(upload: Upload) -> Path:
    return Path(settings.HEADROOM_HOME) / "uploads" / str(upload.pk)


def make_folder(upload: Upload) -> Path:
    """The folder of what has come, made where it is not there: before the first byte, and after a restore, since a backup has
    the rows of uploads and nothing of their files."""
    folder = _folder(upload)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def piece_path(upload: Upload, number: int) -> Path:
    """The file that holds what has come of one file."""
    return _folder(upload) / str(number)


def _refusal(field: str, value: Any, *, allowed: Any) -> InvalidInput:
    shown = str(value)[:80]
    return InvalidInput(f"{field} is {shown!r}; allowed: {allowed}", field=field, value=shown, allowed=allowed)
