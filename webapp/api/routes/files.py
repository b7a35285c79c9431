"""Downloads and logs. Paths come from rows and must lie below HEADROOM_HOME, whatever a link inside says."""

from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest
from django.http.response import HttpResponseBase
from ninja import Router

from webapp.http.streaming import ClosedStream, find_inside_home, read_in_chunks, stream_file
from webapp.jobs.models import Job, Kind
from webapp.jobs.queries import artifacts_visible_to, jobs_visible_to

router = Router()


@router.get("/artifacts/{artifact_id}/download", tags=["jobs"])
def download_artifact(request: HttpRequest, artifact_id: str) -> HttpResponseBase:
    """The file, as an attachment."""
    artifact = artifacts_visible_to(request.user).filter(pk=artifact_id).first()
    if artifact is None:
        raise Http404
    return stream_file(artifact.file, name=Path(artifact.name).name, sha256=artifact.sha256)


@router.get("/jobs/{job_id}/results", tags=["jobs"])
def get_results(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """A generate job's lines that are done so far, errors among them, in the order in which they came: JSON lines of
    ``index`` (the line's, from 0), ``is_error``, ``record`` (the line of the finished file) and its tokens.
    """
    job = jobs_visible_to(request.user).filter(pk=job_id, kind=Kind.GENERATE).first()
    if job is None:
        raise Http404
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "results"
    found = [find_inside_home(path) for path in sorted(folder.glob("part-*.jsonl"))]
    response = ClosedStream(
        read_in_chunks([path for path in found if path is not None]), content_type="application/jsonl; charset=utf-8"
    )
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    return response


@router.get("/jobs/{job_id}/logs", tags=["jobs"])
def get_logs(request: HttpRequest, job_id: str) -> HttpResponseBase:
    """The logs of all attempts, oldest first, as plain text."""
    job = jobs_visible_to(request.user).filter(pk=job_id).first()
    if job is None:
        raise Http404
    response = ClosedStream(read_in_chunks(_log_files(job)), content_type="text/plain; charset=utf-8")
    response["Content-Security-Policy"] = "sandbox; default-src 'none'"
    return response


def _log_files(job: Job) -> list[Path]:
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "attempts"
    found = (find_inside_home(folder / str(number) / "log.txt") for number in range(1, job.attempt + 1))
    return [path for path in found if path is not None]


