"""Uploads files: small ones in one request, others in pieces that survive a cut, of the line or of this process.

An upload that was begun and not finished is found by what it announced (names, sizes, hashes) and gone on with, so the same
command simply run again continues.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from headroom.client import types
from headroom.client.connection import Connection, Row, in_path
from optimizer.base.errors import HeadroomError

SMALL_BYTES = 1024 * 1024
"""Largest size that goes up in one request."""
MAX_FAILURES = 8
"""In a row, of one piece; with the pauses between them about two minutes."""
_LONGEST_PAUSE_S = 30.0
_FIELDS = {"config.json": "config", "tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer_config"}

Progress = Callable[[int, int], None]


class UploadCalls(Connection):
    """Uploads in pieces, as ``send_files`` uses them."""

    def uploads(self) -> list[types.Upload]:
        """Those that are not finished."""
        return self._all_rows("uploads")

    def upload(self, upload_id: str) -> types.Upload:
        return cast(types.Upload, self._json("GET", f"uploads/{in_path(upload_id)}"))

    def begin_upload(
        self, kind: str, files: Sequence[Row], *, name: str, purpose: str = "text", columns: str = ""
    ) -> types.Upload:
        body = {"kind": kind, "name": name, "purpose": purpose, "columns": columns, "files": list(files)}
        return cast(types.Upload, self._json("POST", "uploads", json=body))

    def send_piece(self, upload_id: str, number: int, piece: bytes, *, offset_bytes: int) -> int:
        """Bytes of the file that the service has after the call."""
        headers = {"X-Piece-SHA256": hashlib.sha256(piece).hexdigest(), "Content-Type": "application/octet-stream"}
        path = f"uploads/{in_path(upload_id)}/files/{number}"
        answer = self._json("PUT", path, params={"offset": offset_bytes}, content=piece, headers=headers, timeout=120)
        return int(answer["received_bytes"])

    def finish_upload(self, upload_id: str) -> Row:
        """The model or dataset that it becomes. Checking a large file takes minutes."""
        return self._json("POST", f"uploads/{in_path(upload_id)}/finish", timeout=None)

    def drop_upload(self, upload_id: str) -> None:
        self._request("DELETE", f"uploads/{in_path(upload_id)}")


def send_files(
    client: UploadCalls,
    kind: str,
    files: Sequence[Path],
    *,
    name: str,
    purpose: str = "text",
    columns: str = "",
    root: Path | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """The model or dataset that they become. Raises ApiProblem, and ServiceUnreachable when nothing answers for minutes.

    root: the folder by whose inside the files are named; without it by their own names.
    """
    total_bytes = sum(path.stat().st_size for path in files)
    if total_bytes <= SMALL_BYTES:
        return _send_at_once(client, kind, files, name=name, purpose=purpose, columns=columns)
    announced = [_announce(path, name=path.relative_to(root).as_posix() if root else path.name) for path in files]
    upload = _find_begun(client, kind, announced, name=name, purpose=purpose, columns=columns)
    if upload is None:
        upload = client.begin_upload(kind, announced, name=name, purpose=purpose, columns=columns)
    done_bytes = 0
    for number, path in enumerate(files):
        done_bytes = _send_file(client, upload, number, path, done_bytes, lambda sent: _tell(on_progress, sent, total_bytes))
    return client.finish_upload(upload["id"])


def _send_at_once(
    client: UploadCalls, kind: str, files: Sequence[Path], *, name: str, purpose: str, columns: str
) -> dict[str, Any]:
    if kind == "dataset":
        return client.post_files("datasets", [("file", files[0])], name=name, purpose=purpose, columns=columns)
    return client.post_files("models", [(_field(path), path) for path in files], name=name)


def _field(path: Path) -> str:
    """Name of the form's field that takes a file of a model."""
    is_part_of_weights = path.suffix in (".safetensors", ".gguf") or path.name.endswith(".safetensors.index.json")
    return _FIELDS.get(path.name, "weights" if is_part_of_weights else "files")


def _announce(path: Path, *, name: str) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "name": name,
            "num_bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _find_begun(
    client: UploadCalls, kind: str, announced: list[dict[str, Any]], *, name: str, purpose: str, columns: str
) -> types.Upload | None:
    for upload in client.uploads():
        files = [{key: file[key] for key in ("name", "num_bytes", "sha256")} for file in upload["files"]]
        wanted = (kind, name, purpose, columns, announced)
        if (upload["kind"], upload["name"], upload["purpose"], upload["columns"], files) == wanted:
            return upload
    return None


def _send_file(
    client: UploadCalls,
    upload: types.Upload,
    number: int,
    path: Path,
    done_bytes: int,
    report_bytes: Callable[[int], None],
) -> int:
    """The bytes of all files so far."""
    num_bytes, here_bytes = upload["files"][number]["num_bytes"], upload["files"][number]["received_bytes"]
    num_failures = 0
    with path.open("rb") as file:
        while here_bytes < num_bytes:
            report_bytes(done_bytes + here_bytes)
            file.seek(here_bytes)
            piece = file.read(upload["piece_bytes"])
            try:
                here_bytes = client.send_piece(upload["id"], number, piece, offset_bytes=here_bytes)
                num_failures = 0
            except HeadroomError as error:
                num_failures += 1
                if num_failures >= MAX_FAILURES or not _may_pass(error):
                    raise
                time.sleep(min(_LONGEST_PAUSE_S, 0.5 * 2**num_failures))
                here_bytes = _where_it_stands(client, upload["id"], number, otherwise=here_bytes)
    report_bytes(done_bytes + num_bytes)
    return done_bytes + num_bytes


def _may_pass(error: HeadroomError) -> bool:
    """Report whether asking again can help: the line, the server, or another sender of the same file failed."""
    status = getattr(error, "status", None)
    return status is None or status >= 500 or status in (408, 409, 429)


def _where_it_stands(client: UploadCalls, upload_id: str, number: int, *, otherwise: int) -> int:
    try:
        return client.upload(upload_id)["files"][number]["received_bytes"]
    except HeadroomError:
        return otherwise


def _tell(on_progress: Progress | None, sent_bytes: int, total_bytes: int) -> None:
    if on_progress is not None:
        on_progress(sent_bytes, total_bytes)
