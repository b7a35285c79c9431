"""The only way to read this app's rows: a person's own, all of them for administrators."""

from typing import Any

from django.db.models import Q, QuerySet

from webapp.batches.models import Batch, BatchFile


def files_visible_to(user: Any) -> QuerySet[BatchFile]:
    return BatchFile.objects.filter(_visible(user))


def batches_visible_to(user: Any) -> QuerySet[Batch]:
    return Batch.objects.filter(_visible(user)).select_related("job", "model", "dataset")


def _visible(user: Any) -> Q:
    if not user.is_authenticated:
        return Q(pk__isnull=True)
    return Q() if user.is_superuser else Q(owner=user)
