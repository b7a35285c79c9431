"""Fetches models from the hub as uploads whose sender is the reconciler: how much is here is the length of what is here.

A download is begun with the commit pinned and the room on the disk checked; ``advance_downloads`` goes on with each, a pass at a
time, in a thread of the reconciler. Small files are checked against git's hash, large ones against their sha256.
"""

import errno
import fcntl
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.utils import timezone

from optimizer.base.errors import DiskFull, HeadroomError
from webapp.catalog.errors import ChecksBusy
from webapp.catalog.hub.client import LINKED_SIZE, HubFailed, HubRefused, find_model, open_file, read_reference
from webapp.catalog.models import Model, Upload
from webapp.catalog.queries import uploads_visible_to
from webapp.catalog.uploads import begin_upload, drop_pieces, finish_upload, make_folder, piece_path, received_bytes

logger = logging.getLogger(__name__)

MAX_FAILURES = 40
"""Failed passes in a row after which a download is given up; with their pauses half an hour."""
_NOTE_EVERY_S = 5.0
_LONGEST_PAUSE_S = 60.0


def is_open() -> bool:
    """Report whether an administrator has opened the hub."""
    return bool(settings.HEADROOM_HUB)


def begin_download(*, owner: User, name: str, reference: str) -> Upload:
    """reference: ``owner/name[@revision]``. Raises HubRefused, HubFailed, DiskFull."""
    if not is_open():
        raise HubRefused("it is not open", allowed="a folder or an upload", hint="An administrator opens it with HEADROOM_HUB=1.")
    repo, revision = read_reference(reference)
    model = find_model(repo, revision)
    files = [
        {"name": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256, "mark": file.git_sha1}
        for file in model.files
    ]
    source = {"hub": repo, "revision": revision, "commit": model.commit, "state": "downloading", "message": "", "failures": 0}
    return begin_upload(owner=owner, kind="model", name=name or repo.rpartition("/")[2], files=files, source=source)


def list_downloads(user: Any) -> list[dict[str, Any]]:
    """Those of a person that are not models yet, each with how far it is."""
    rows = [row for row in uploads_visible_to(user) if row.source.get("state") in ("downloading", "failed")]
    return [
        {
            "id": row.pk,
            "name": row.name,
            "source": row.source,
            "received_bytes": sum(received_bytes(row, number) for number in range(len(row.files))),
            "num_bytes": sum(file["num_bytes"] for file in row.files),
        }
        for row in rows
    ]


def advance_downloads(should_stop: Callable[[], bool] = lambda: False) -> list[str]:
    """Go on with each open download until it is done, fails, or should stop; the ids of those that were finished.

    One that fails keeps none of the others waiting. Raises DatabaseError, since without the database none can go on.
    """
    finished = []
    downloading = Upload.objects.filter(source__state="downloading").order_by("created_at")
    for upload_id in list(downloading.values_list("pk", flat=True)):
        if should_stop():
            break
        upload = downloading.filter(pk=upload_id).first()
        if upload is None:  # given up while another one was fetched, for hours perhaps
            continue
        try:
            if _is_due(upload) and _advance(upload, should_stop):
                finished.append(upload_id)
        except DatabaseError:
            raise
        except OSError as error:
            _note_failure(upload, f"what comes cannot be kept: {error.strerror}")
        except Exception:
            logger.exception("download %s waits; a fault of the program", upload_id)
    return finished


def _is_due(upload: Upload) -> bool:
    return time.time() >= float(upload.source.get("not_before_s", 0.0))


def _advance(upload: Upload, should_stop: Callable[[], bool]) -> bool:
    """Report whether it is finished. What goes wrong is written on the row, for its owner to read."""
    with (make_folder(upload) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            for number in range(len(upload.files)):
                _fetch(upload, number, should_stop)
            if should_stop():
                return False
            made = finish_upload(upload, keeps_row=True)
        except ChecksBusy:
            return False  # all is here; the next pass asks again
        except (HubFailed, DiskFull) as error:
            _note_failure(upload, error.message)
            return False
        except HeadroomError as error:
            _note(upload, state="failed", message=f"{error.message}. {error.hint}".strip())
            drop_pieces(upload)
            return False
    assert isinstance(made, Model)
    _note(upload, state="done", message="", model=made.pk)
    return True


def _fetch(upload: Upload, number: int, should_stop: Callable[[], bool]) -> None:
    """One file from where it stands. Raises HubFailed, HubRefused, DiskFull."""
    file, path = upload.files[number], piece_path(upload, number)
    here_bytes = received_bytes(upload, number)
    if here_bytes < file["num_bytes"]:
        with open_file(upload.source["hub"], upload.source["commit"], file["name"], offset_bytes=here_bytes) as response:
            _require_size(response, file, here_bytes)
            at_bytes = here_bytes if response.status_code == 206 else 0
            _append(upload, path, response, at_bytes=at_bytes, file=file, should_stop=should_stop)
        here_bytes = received_bytes(upload, number)
        if here_bytes < file["num_bytes"] and not should_stop():
            raise HubFailed(f"the line was cut after {here_bytes:,} of {file['num_bytes']:,} bytes of {file['name']}")
    elif not file["num_bytes"]:
        path.touch()
    if not should_stop():
        _check_hash(file, path)


def _require_size(response: httpx.Response, file: dict[str, Any], here_bytes: int) -> None:
    """Hold what the answer says of the file's size against what was announced. Raises HubRefused."""
    sizes = [response.headers.get(LINKED_SIZE)]
    if response.status_code == 206:
        begin, _, total = response.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        if not begin.startswith(f"{here_bytes}-"):
            raise HubFailed(f"the hub sends another part of {file['name']} than was asked for")
        sizes.append(total)
    else:
        sizes.append(response.headers.get("content-length"))
    for size in sizes:
        if size and size.isdigit() and int(size) != file["num_bytes"]:
            raise HubRefused(f"{file['name']} has {int(size):,} bytes", allowed=f"{file['num_bytes']:,}, as it was announced")


def _append(
    upload: Upload,
    path: Path,
    response: httpx.Response,
    *,
    at_bytes: int,
    file: dict[str, Any],
    should_stop: Callable[[], bool],
) -> None:
    noted_s = time.monotonic()
    try:
        with path.open("ab") as out:
            out.truncate(at_bytes)
            for chunk in response.iter_raw():
                at_bytes += len(chunk)
                if at_bytes > file["num_bytes"]:
                    raise HubRefused(f"{file['name']} is longer than announced", allowed=f"{file['num_bytes']:,} bytes")
                out.write(chunk)
                if time.monotonic() - noted_s > _NOTE_EVERY_S:
                    noted_s = time.monotonic()
                    Upload.objects.filter(pk=upload.pk).update(updated_at=timezone.now())
                    if not Upload.objects.filter(pk=upload.pk).exists():
                        raise HubRefused("the download was given up", allowed="to begin it again")
                if should_stop():
                    return
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"{file['name']} could not be kept: the disk is full", hint="Free some disk space; it goes on.") from error


def _check_hash(file: dict[str, Any], path: Path) -> None:
    """A file that is not what the hub named goes, so that it can be fetched again. Raises HubRefused."""
    if file["sha256"]:
        return  # finish_upload reads large files once, for this
    with path.open("rb") as stream:
        digest = hashlib.sha1(f"blob {file['num_bytes']}\0".encode(), usedforsecurity=False)
        digest.update(stream.read())
    if digest.hexdigest() != file["mark"]:
        path.unlink()
        raise HubRefused(f"{file['name']} is not what the commit names", allowed="the content with git's hash of it")


def _note_failure(upload: Upload, why: str) -> None:
    failures = int(upload.source.get("failures", 0)) + 1
    if failures >= MAX_FAILURES:
        _note(upload, state="failed", message=f"{why}; given up after {failures} tries")
        drop_pieces(upload)
        return
    pause_s = min(_LONGEST_PAUSE_S, float(settings.HEADROOM_RETRY_BASE_S) * 2 ** min(failures - 1, 6) / 10)
    _note(upload, failures=failures, message=f"{why}; trying again", not_before_s=time.time() + pause_s)


def _note(upload: Upload, **changes: Any) -> None:
    upload.source = {**upload.source, **changes}
    Upload.objects.filter(pk=upload.pk).update(source=upload.source, updated_at=timezone.now())
    if changes.get("message"):
        logger.info("download %s of %s: %s", upload.pk, upload.source["hub"], changes["message"])
