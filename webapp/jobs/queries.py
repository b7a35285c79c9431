"""The only way to read this app's rows: a person's own, all of them for administrators. Profiling jobs are not listed."""

from typing import Any

from django.db.models import Q, QuerySet

from webapp.jobs.models import PEOPLES_KINDS, Artifact, Checkpoint, Event, Job, PlanOffer


def jobs_visible_to(user: Any) -> QuerySet[Job]:
    return Job.objects.filter(_visible(user), kind__in=PEOPLES_KINDS).select_related("machine")


def offers_visible_to(user: Any) -> QuerySet[PlanOffer]:
    """Own offers only: a plan is taken by whom it was offered to."""
    return PlanOffer.objects.filter(owner=user) if user.is_authenticated else PlanOffer.objects.none()


def artifacts_visible_to(user: Any) -> QuerySet[Artifact]:
    return Artifact.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def checkpoints_visible_to(user: Any) -> QuerySet[Checkpoint]:
    return Checkpoint.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def events_visible_to(user: Any) -> QuerySet[Event]:
    return Event.objects.filter(job__in=jobs_visible_to(user).values("pk"))


def _visible(user: Any) -> Q:
    if not user.is_authenticated:
        return Q(pk__isnull=True)
    return Q() if user.is_superuser else Q(owner=user)
