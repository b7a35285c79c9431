"""The only way to read this app's rows: those of a person's projects, all of them for administrators."""

from typing import Any

from django.db.models import QuerySet

from webapp.accounts.access import visible_rows
from webapp.batches.models import Batch, BatchFile


def files_visible_to(user: Any) -> QuerySet[BatchFile]:
    return BatchFile.objects.filter(visible_rows(user))


def batches_visible_to(user: Any) -> QuerySet[Batch]:
    return Batch.objects.filter(visible_rows(user)).select_related("job", "model", "dataset")

