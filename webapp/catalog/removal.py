"""Deleting a model or dataset: at once out of everyone's sight, for some days to be had back, then gone with its files.

A job keeps its row: of what a job names only the files go, and not before every such job has ended.
"""

import logging
import shutil
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db.models import ProtectedError
from django.db.models.functions import Now
from django.utils import timezone

from webapp.catalog.errors import CatalogConflict
from webapp.catalog.models import Dataset, Model

logger = logging.getLogger(__name__)

KEPT = timedelta(days=7)
Row = Model | Dataset


def delete_row(row: Row) -> None:
    """Again changes nothing. Raises CatalogConflict for what ships with the program."""
    if row.owner_id is None:
        raise CatalogConflict(f"{row.name} ships with the program and stays", hint="Delete what was uploaded.")
    type(row)._default_manager.filter(pk=row.pk, deleted_at__isnull=True).update(deleted_at=Now())
    row.refresh_from_db(fields=["deleted_at"])


def restore_row(row: Row) -> None:
    """Raises CatalogConflict when its files are gone."""
    if not _folder(row).exists():
        raise CatalogConflict(
            f"{row.name} was deleted more than {KEPT.days} days ago; its files are gone", hint="Upload it again."
        )
    type(row)._default_manager.filter(pk=row.pk).update(deleted_at=None)
    row.refresh_from_db(fields=["deleted_at"])


def purge_deleted() -> list[str]:
    """Remove the files of rows deleted KEPT ago or more; the ids whose files were removed."""
    oldest = timezone.now() - KEPT
    rows: list[Row] = [*Model.objects.filter(deleted_at__lt=oldest), *Dataset.objects.filter(deleted_at__lt=oldest)]
    ids = [row.pk for row in rows]  # a row that is deleted forgets its own
    return [row_id for row_id, row in zip(ids, rows, strict=True) if _purge(row)]


def _purge(row: Row) -> bool:
    row_id, folder = row.pk, _folder(row)
    if row.job_set.filter(finished_at__isnull=True).exists():
        return False
    try:
        row.delete()
    except ProtectedError:
        logger.debug("%s stays as a row: ended jobs name it", row_id)
    was_there = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return was_there


def _folder(row: Row) -> Path:
    kind = "models" if isinstance(row, Model) else "datasets"
    return Path(settings.HEADROOM_HOME) / kind / str(row.pk)
