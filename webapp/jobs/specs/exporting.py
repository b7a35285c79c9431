"""Reads what of a checkpoint is to be written: fields of ``workload.export`` over those of the job it is from."""

from typing import Any

from optimizer.base.errors import InvalidWorkload
from optimizer.base.serialize import from_json
from optimizer.workload import Export
from webapp.jobs.models import Job
from webapp.jobs.specs.training import with_sizes


def read_export(job: Job, given: dict[str, Any]) -> Export:
    """Raises InvalidWorkload that names the field."""
    document = {**job.spec["workload"].get("export", {}), **with_sizes(given, Export)}
    return from_json(Export, document, path="export", error=InvalidWorkload)
