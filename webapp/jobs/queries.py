"""The only way to read this app's rows: those of a person's projects, all for administrators. Profiling jobs are not listed."""

from typing import Any

from django.db.models import QuerySet

from webapp.accounts.access import visible_rows
from webapp.jobs.models import USER_JOB_KINDS, Artifact, Checkpoint, Event, Job, PlanOffer


def jobs_visible_to(user: Any) -> QuerySet[Job]:
    return Job.objects.filter(visible_rows(user), kind__in=USER_JOB_KINDS).select_related("machine")


def offers_visible_to(user: Any) -> QuerySet[PlanOffer]:
    """Own offers only: a plan is taken by whom it was offered to."""
    return PlanOffer.objects.filter(owner=user) if user.is_authenticated else PlanOffer.objects.none()


def artifacts_visible_to(user: Any) -> QuerySet[Artifact]:
    return Artifact.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def checkpoints_visible_to(user: Any) -> QuerySet[Checkpoint]:
    return Checkpoint.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def events_visible_to(user: Any) -> QuerySet[Event]:
    return Event.objects.filter(job__in=jobs_visible_to(user).values("pk"))

