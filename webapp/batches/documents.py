"""Files, batches and models in OpenAI's form: times in Unix seconds, everything that is not there yet null.

https://platform.openai.com/docs/api-reference/batch/object, .../files/object
"""

from datetime import datetime
from typing import Any

from webapp.batches.models import Batch, BatchFile
from webapp.catalog.models import Model
from webapp.jobs.models import Job


def file_document(file: BatchFile) -> dict[str, Any]:
    return {
        "id": file.pk,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": _seconds(file.created_at),
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_document(batch: Batch) -> dict[str, Any]:
    """Select ``job`` and ``model`` with it, or pay for them."""
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    return {
        "id": batch.pk,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model.name if batch.model else None,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.in_progress_at),
        "expires_at": _seconds(batch.expires_at),
        "finalizing_at": _seconds(batch.finalizing_at),
        "completed_at": _seconds(batch.completed_at),
        "failed_at": _seconds(batch.failed_at),
        "expired_at": _seconds(batch.expired_at),
        "cancelling_at": _seconds(batch.cancelling_at),
        "cancelled_at": _seconds(batch.cancelled_at),
        "request_counts": _request_counts(batch),
        "metadata": batch.metadata,
        "headroom_job_id": batch.job_id,
    }


def model_document(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _seconds(model.created_at),
        "owned_by": model.owner.get_username() if model.owner else "headroom",
    }


def tuned_document(run: Job) -> dict[str, Any]:
    """A model with what a run on it left; the run's name is said as well."""
    return {
        "id": f"{run.model.name}:{run.pk}",
        "object": "model",
        "created": _seconds(run.finished_at),
        "owned_by": run.owner.get_username() if run.owner else "headroom",
        "headroom_job_name": run.name,
    }


def _request_counts(batch: Batch) -> dict[str, int]:
    job = batch.job
    if job is None:
        return {"total": 0, "completed": 0, "failed": 0}
    num_failed = int(job.summary.get("num_errors") or 0)
    return {"total": job.num_steps, "completed": max(0, job.step - num_failed), "failed": num_failed}


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
