"""Downloads and logs. Paths come from rows and must lie below HEADROOM_HOME, whatever a link inside says."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Router

from webapp.jobs.models import Job, Kind
from webapp.jobs.queries import artifacts_visible_to, jobs_visible_to

router = Router()
_CHUNK_BYTES = 64 * 1024


@router.get("/artifacts/{artifact_id}/download", tags=["jobs"])
def download_artifact(request: HttpRequest, artifact_id: str) -> HttpResponseBase:
    """The file, as an attachment."""
    artifact = artifacts_visible_to(request.user).filter(pk=artifact_id).first()
    if artifact is None:
        raise Http404
    return stream_file(artifact.file, name=Path(artifact.name).name, sha256=artifact.sha256)


def stream_file(file: str, *, name: str, sha256: str) -> HttpResponseBase:
    """A row's file below HEADROOM_HOME, as an attachment. Raises Http404 where it is gone."""
    path = _inside_home(Path(settings.HEADROOM_HOME) / file)
    if path is None:
        raise Http404
    # an asynchronous iterator: Django reads a synchronous one, FileResponse's too, into memory before it sends a byte
    response = StreamingHttpResponse(_chunks([path]), content_type="application/octet-stream")
    response["Content-Length"] = str(path.stat().st_size)
    response["Content-Disposition"] = content_disposition_header(as_attachment=True, filename=name) or "attachment"
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    response["ETag"] = f'"{sha256}"'
    return response


@router.get("/jobs/{job_id}/results", tags=["jobs"])
def get_results(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """Of a generate job the lines that are done so far, errors among them, in the order in which they came: JSON lines of
    ``index`` (the line's, from 0), ``is_error``, ``record`` (the line of the finished file) and its tokens.
    """
    job = jobs_visible_to(request.user).filter(pk=job_id, kind=Kind.GENERATE).first()
    if job is None:
        raise Http404
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "results"
    found = [_inside_home(path) for path in sorted(folder.glob("part-*.jsonl"))]
    response = StreamingHttpResponse(
        _chunks([path for path in found if path is not None]), content_type="application/jsonl; charset=utf-8"
    )
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    return response


@router.get("/jobs/{job_id}/logs", tags=["jobs"])
def get_logs(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """The logs of all attempts, oldest first, as plain text."""
    job = jobs_visible_to(request.user).filter(pk=job_id).first()
    if job is None:
        raise Http404
    response = StreamingHttpResponse(_chunks(_log_files(job)), content_type="text/plain; charset=utf-8")
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    return response


def _log_files(job: Job) -> list[Path]:
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "attempts"
    found = (_inside_home(folder / str(number) / "log.txt") for number in range(1, job.attempt + 1))
    return [path for path in found if path is not None]


async def _chunks(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        with await asyncio.to_thread(path.open, "rb") as file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk


def _inside_home(path: Path) -> Path | None:
    real = path.resolve()
    is_inside = real.is_relative_to(Path(settings.HEADROOM_HOME).resolve())
    return real if is_inside and real.is_file() else None
