"""The only way to read this app's rows: those of a person's projects, all for administrators. Profiling jobs are not listed."""

from typing import Any, Final

from django.db.models import QuerySet

from webapp.accounts.access import visible_rows
from webapp.jobs.models import USER_JOB_KINDS, Artifact, Checkpoint, Event, Job, PlanOffer, SavedFilter, State

LARGE_DOCUMENTS: Final = ("spec", "plan", "prediction", "machine__document", "machine__calibration")
"""Columns that lists leave in the database: some 10 kB in each row."""
LARGE_DOCUMENTS_OF_MODEL: Final = ("model__config", "model__unread", "model__linked_files", "model__generation")
"""The same of a job's model, where that is selected with it."""


def jobs_visible_to(user: Any) -> QuerySet[Job]:
    return Job.objects.filter(visible_rows(user), kind__in=USER_JOB_KINDS, deleted_at__isnull=True).select_related("machine")


def waiting_jobs_visible_to(user: Any) -> QuerySet[Job]:
    """Waiting jobs among ``jobs_visible_to``. None is deleted, so the index of claims answers without reading a row."""
    return Job.objects.filter(visible_rows(user), state=State.QUEUED, kind__in=USER_JOB_KINDS)


def deleted_jobs_visible_to(user: Any) -> QuerySet[Job]:
    """Deleted jobs that can still be restored."""
    return Job.objects.filter(visible_rows(user), kind__in=USER_JOB_KINDS, deleted_at__isnull=False)


def rows_of_page(page: QuerySet[Job], rows: QuerySet[Job]) -> list[Job]:
    """The rows of a page, in its order. Its ids are looked up first, which an index does by itself: sorted whole, the rows'
    documents would be read from the disk."""
    ids = list(page.values_list("pk", flat=True))
    found = {row.pk: row for row in rows.filter(pk__in=ids)}
    return [found[pk] for pk in ids if pk in found]


def latest_jobs_visible_to(user: Any, *, most: int, **filters: Any) -> list[Job]:
    """The newest first, as lists show them. filters: ``model`` or ``dataset``, which have an index in this order."""
    found = jobs_visible_to(user).filter(**filters)
    return rows_of_page(found.order_by("-id")[:most], found.defer(*LARGE_DOCUMENTS))


def filters_of(user: Any) -> QuerySet[SavedFilter]:
    """A person's own alone."""
    return SavedFilter.objects.filter(owner=user) if user.is_authenticated else SavedFilter.objects.none()


def offers_visible_to(user: Any) -> QuerySet[PlanOffer]:
    """Own offers only: a plan is taken by whom it was offered to."""
    return PlanOffer.objects.filter(owner=user) if user.is_authenticated else PlanOffer.objects.none()


def artifacts_visible_to(user: Any) -> QuerySet[Artifact]:
    return Artifact.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def checkpoints_visible_to(user: Any) -> QuerySet[Checkpoint]:
    return Checkpoint.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def events_visible_to(user: Any) -> QuerySet[Event]:
    return Event.objects.filter(job__in=jobs_visible_to(user).values("pk"))

