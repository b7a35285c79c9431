"""The only writer of files and batches. A batch moves by guarded updates, as jobs do, so that two who move it do it once.

``create_batch`` only records; ``advance_batches``, called every few seconds by the reconciler, validates, prices and starts, and
follows the job to its end. A batch that nobody polls is done all the same.
"""

import logging
from datetime import timedelta
from typing import Any, Final

from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import DiskFull, HeadroomError, InvalidInput
from optimizer.data.prompts import ENVELOPE_PROBLEMS, URLS
from webapp.accounts.access import act_in, project_of_job
from webapp.batches.answers import RequestRefused
from webapp.batches.models import OPEN_STATUSES, Batch, BatchFile, Status
from webapp.batches.queries import files_visible_to
from webapp.catalog.actions import create_dataset, remove_dataset
from webapp.catalog.errors import ChecksBusy
from webapp.catalog.models import Dataset
from webapp.catalog.queries import machines_visible_to, models_visible_to
from webapp.jobs.actions import cancel_job
from webapp.jobs.devices.room import largest_device
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Artifact, Job, State
from webapp.jobs.specs.training import find_visible
from webapp.planning.submitting import NotPricedYet, submit_job

logger = logging.getLogger(__name__)

WINDOWS: Final = {"24h": timedelta(hours=24)}
DEFAULT_TEMPERATURE: Final = 1.0
"""Temperature that OpenAI's API takes where a request names none."""
MAX_METADATA_PAIRS: Final = 16
_MAX_KEY_CHARACTERS: Final = 64
_MAX_VALUE_CHARACTERS: Final = 512
_ACTOR: Final = "batches"


def upload_file(*, owner: User, file: "UploadedFile[Any]", purpose: str) -> BatchFile:
    """Raises RequestRefused for another purpose, InvalidDataset for what cannot be read as lines."""
    if purpose != "batch":
        raise RequestRefused(f"purpose is {purpose!r:.80}; allowed: batch", param="purpose", code="invalid_purpose")
    filename = " ".join((file.name or "").split())[:255]
    filename = filename if filename.isprintable() and filename else "batch.jsonl"
    dataset = create_dataset(owner=owner, name=filename[:200], file=file, purpose="prompts")
    return BatchFile.objects.create(
        owner=owner, project=dataset.project, filename=filename, purpose="batch", dataset=dataset, num_bytes=dataset.num_bytes
    )


def delete_file(file: BatchFile) -> None:
    """The lines go too, unless a batch or a job still names them."""
    dataset = file.dataset
    file.delete()
    if dataset is not None:
        remove_dataset(dataset)


def create_batch(
    user: User, *, input_file_id: str, endpoint: str, completion_window: str, metadata: dict[str, Any] | None
) -> Batch:
    """Recorded, to be validated. Raises RequestRefused, and Forbidden for who may only look at the file."""
    file = files_visible_to(user).filter(pk=input_file_id, purpose="batch").first() if input_file_id.isprintable() else None
    if file is None or file.dataset is None:
        raise RequestRefused(
            f"input_file_id {input_file_id[:80]!r} is not an uploaded file of purpose batch", param="input_file_id"
        )
    if endpoint not in URLS:
        raise RequestRefused(f"endpoint is {endpoint[:80]!r}; allowed: {', '.join(URLS)}", param="endpoint")
    if completion_window not in WINDOWS:
        raise RequestRefused(
            f"completion_window is {completion_window[:80]!r}; allowed: {', '.join(WINDOWS)}", param="completion_window"
        )
    _check_metadata(metadata)
    return Batch.objects.create(
        owner=user,
        project=project_of_job(user, (file.dataset,)),
        dataset=file.dataset,
        input_file=file.pk,
        endpoint=endpoint,
        completion_window=completion_window,
        metadata=metadata,
        expires_at=timezone.now() + WINDOWS[completion_window],
    )


def cancel_batch(batch: Batch) -> bool:
    """Cancel a batch; finished lines stay. False, and nothing changed, for one that has ended."""
    if _move(batch, when=(Status.VALIDATING,), to=Status.CANCELLED, cancelling_at=Now(), cancelled_at=Now()):
        return True
    if not _move(batch, when=(Status.IN_PROGRESS, Status.FINALIZING), to=Status.CANCELLING, cancelling_at=Now()):
        return batch.status in (Status.CANCELLING, Status.CANCELLED)
    _stop_job(batch)
    follow_job(batch)
    return True


def advance_batches() -> list[str]:
    """Move every open batch as far as it goes now; the ids of those that moved."""
    moved = []
    open_ones = Batch.objects.filter(status__in=OPEN_STATUSES)
    for batch in open_ones.select_related("job", "owner", "dataset", "project").order_by("pk"):
        before = batch.status
        try:
            _advance(batch)
        except DatabaseError:
            raise
        except Exception:
            # one batch on which the program fails must not hold up the others
            logger.exception("%s ended by a fault of the program", batch.pk)
            _fail(batch, [_problem("internal", "Headroom itself failed; its log says where")])
        if batch.status != before:
            moved.append(batch.pk)
    return moved


def _advance(batch: Batch) -> None:
    if batch.status == Status.VALIDATING:
        _validate(batch)
    else:
        follow_job(batch)


def follow_job(batch: Batch) -> None:
    """From the job's state to the batch's. Cheap; also called when someone looks."""
    job = batch.job
    if job is None or batch.status not in OPEN_STATUSES:
        return
    if not job.is_terminal:
        if batch.status == Status.IN_PROGRESS and job.phase == "saving":
            _move(batch, when=(Status.IN_PROGRESS,), to=Status.FINALIZING, finalizing_at=Now())
        if batch.expires_at <= timezone.now():
            _stop_job(batch)
        return
    with transaction.atomic():
        to, stamp = _end_of(batch, job)
        files = _output_files(batch, job)
        errors = None
        if to == Status.FAILED:
            errors = [{"code": job.reason, "message": job.message or job.reason, "param": None, "line": None}]
        if not _move(batch, when=OPEN_STATUSES, to=to, **files, **{stamp: Now()}, errors=errors):
            BatchFile.objects.filter(pk__in=[pk for pk in files.values() if pk]).delete()


def _validate(batch: Batch) -> None:
    """Start its job, or refuse it; one that cannot be priced yet waits."""
    if batch.expires_at <= timezone.now():
        _move(batch, when=(Status.VALIDATING,), to=Status.EXPIRED, expired_at=Now())
        return
    problems = find_problems(batch.dataset, endpoint=batch.endpoint)
    if problems:
        _fail(batch, problems)
        return
    try:
        _start(batch)
    except (NotPricedYet, ChecksBusy, DiskFull):
        return  # it was accepted: it waits, for its price, for its turn or for room
    except InvalidInput as error:
        _fail(batch, [_problem(error.code, error.message, param=str(error.fields.get("field") or "") or None)])
    except HeadroomError as error:
        _fail(batch, [_problem(error.code, f"{error.message}. {error.hint}".strip())])


def find_problems(dataset: Dataset, *, endpoint: str) -> list[dict[str, Any]]:
    """Why a file is no batch; empty where it is one. Requests that are wrong in themselves are answered one by one."""
    facts = dataset.facts
    found = [
        _problem(problem["code"], problem["message"], param=problem["param"], line=problem["line"])
        for problem in facts["problems"]
        if problem["code"] in ENVELOPE_PROBLEMS
    ]
    if found:
        return found
    if any(facts["refused_by_code"].get(code) for code in ENVELOPE_PROBLEMS):
        return [_problem("invalid_request", "some lines are no requests")]
    if facts["num_batch_lines"] != facts["num_prompts"]:
        message = "some lines have no custom_id and body; each must be a request"
        return [_problem("missing_field", message, param="custom_id")]
    others = sorted(set(facts["urls"]) - {endpoint})
    if others:
        return [_problem("invalid_url", f"url is {others[0]} on some lines; the batch's endpoint is {endpoint}", param="url")]
    if len(facts["models"]) > 1:
        named = ", ".join(sorted(facts["models"])[:5])
        return [_problem("mismatched_model", f"the lines name several models ({named:.200}); a batch has one", param="model")]
    if not facts["models"]:
        return [_problem("empty_batch", "no request can be carried out"), *(_problem(**first) for first in facts["problems"])]
    return []


def _start(batch: Batch) -> None:
    """Raises NotPricedYet, and what pricing raises."""
    act_in(batch.owner, batch.project)
    [model_name] = batch.dataset.facts["models"]
    model = find_visible(models_visible_to(batch.owner), model_name, field="model")
    spec = {
        "kind": "generate",
        "name": f"batch {batch.input_file}",
        "model": model.pk,
        "prompts": batch.dataset.pk,
        "workload": {"temperature": DEFAULT_TEMPERATURE},
        "goal": {"device_budget_bytes": _largest_device_bytes(batch.owner)},
    }

    def keep(job: Job) -> None:
        batch.job, batch.model = job, model
        if not _move(
            batch, when=(Status.VALIDATING,), to=Status.IN_PROGRESS, job=job, model=model, in_progress_at=Now()
        ):
            raise _MovedMeanwhileError

    try:
        submit_job(batch.owner, spec=spec, actor=_ACTOR, and_then=keep)
    except _MovedMeanwhileError:
        batch.refresh_from_db()


class _MovedMeanwhileError(Exception):
    """Takes back the job of a batch that was cancelled, or started by another, while this one priced it."""


def _largest_device_bytes(user: User) -> int:
    """All of the largest machine's device. Raises NotPricedYet where no machine is known."""
    sizes = [int(largest_device(row)["memory_bytes"]) for row in machines_visible_to(user)]
    if not sizes:
        raise NotPricedYet("no machine has registered yet", hint="Start a worker.")
    return max(sizes)


def _end_of(batch: Batch, job: Job) -> tuple[Status, str]:
    """A job that was asked to stop and had just finished has succeeded all the same."""
    if job.state == State.SUCCEEDED:
        return Status.COMPLETED, "completed_at"
    if job.state == State.FAILED:
        return Status.FAILED, "failed_at"
    if batch.cancelling_at is None and batch.expires_at <= timezone.now():
        return Status.EXPIRED, "expired_at"
    return Status.CANCELLED, "cancelled_at"


def _output_files(batch: Batch, job: Job) -> dict[str, str]:
    """Files for what the job left; an empty file is none, as with OpenAI."""
    found = {}
    for column, kind, word in (("output_file", "results", "output"), ("error_file", "errors", "error")):
        artifact = Artifact.objects.filter(job=job, kind=kind, num_bytes__gt=0).first()
        if artifact is not None:
            found[column] = BatchFile.objects.create(
                owner=batch.owner,
                project=batch.project,
                filename=f"{batch.pk}_{word}.jsonl",
                purpose="batch_output",
                artifact=artifact,
                num_bytes=artifact.num_bytes,
            ).pk
    return found


def _stop_job(batch: Batch) -> None:
    if batch.job is None:
        return
    try:
        cancel_job(batch.job, mode="save", actor=_ACTOR)
    except WrongState:
        logger.info("%s: its job has just ended", batch.pk)
    batch.job.refresh_from_db()


def _fail(batch: Batch, problems: list[dict[str, Any]]) -> None:
    _move(batch, when=(Status.VALIDATING,), to=Status.FAILED, failed_at=Now(), errors=problems)


def _move(batch: Batch, *, when: tuple[Status, ...], to: Status, **changes: Any) -> bool:
    """Guarded by the status; the row as it is then is what ``batch`` shows."""
    rows: QuerySet[Batch] = Batch.objects.filter(pk=batch.pk, status__in=when)
    has_moved = bool(rows.update(status=to, **changes))
    batch.refresh_from_db()
    return has_moved


def _problem(code: str, message: str, *, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def _check_metadata(metadata: dict[str, Any] | None) -> None:
    if metadata is None:
        return
    allowed = (
        f"at most {MAX_METADATA_PAIRS} pairs of texts, keys of {_MAX_KEY_CHARACTERS} and values of "
        f"{_MAX_VALUE_CHARACTERS} characters"
    )
    fits = all(
        isinstance(value, str) and len(key) <= _MAX_KEY_CHARACTERS and len(value) <= _MAX_VALUE_CHARACTERS
        for key, value in metadata.items()
    )
    if not fits or len(metadata) > MAX_METADATA_PAIRS:
        raise RequestRefused(f"metadata is too large or holds what is no text; allowed: {allowed}", param="metadata")
