"""Names, tags, notes and shared links of jobs, and their deletion: at once out of sight, some days later gone with their files.

A job at work is not deleted: it is stopped first.
"""

import re
import secrets
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.signing import Signer
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.crypto import constant_time_compare

from optimizer.base.errors import InvalidInput
from webapp.jobs.errors import WrongState
from webapp.jobs.models import Job, SavedFilter

MAX_NAME, MAX_NOTES, MAX_TAG, MAX_TAGS = 200, 20_000, 40, 10
KEPT: Final = timedelta(days=7)
_TAG: Final = re.compile(r"[\w.:+-][\w .:+-]*")


def describe_job_as(job: Job, *, name: str | None = None, tags: Sequence[str] | None = None, notes: str | None = None) -> Job:
    """Change what is given. Raises InvalidInput for an empty or too long name, and for tags that are no short words."""
    changes: dict[str, Any] = {}
    if name is not None:
        changes["name"] = _read_name(name)
    if tags is not None:
        changes["tags"] = read_tags(tags)
    if notes is not None:
        changes["notes"] = _read_text(notes, field="notes", longest=MAX_NOTES)
    if changes:
        Job.objects.filter(pk=job.pk).update(**changes)
        job.refresh_from_db(fields=list(changes))
    return job


def read_tags(tags: Sequence[str]) -> list[str]:
    """Each once, in the order given. Raises InvalidInput."""
    found = list(dict.fromkeys(text for tag in tags if (text := " ".join(str(tag).split()))))
    if len(found) > MAX_TAGS:
        raise InvalidInput(f"{len(found)} tags were given; at most {MAX_TAGS} are kept", field="tags", value=len(found))
    for tag in found:
        if len(tag) > MAX_TAG or not _TAG.fullmatch(tag):
            raise InvalidInput(
                f"tag {tag[:MAX_TAG]!r} is not a short word; letters, digits, spaces and . : + - are allowed, at most {MAX_TAG}",
                field="tags",
                value=tag[:MAX_TAG],
            )
    return found


def delete_job(job: Job) -> Job:
    """Again changes nothing. Raises WrongState for a job that has not ended."""
    job.refresh_from_db()
    if not job.is_terminal:
        raise WrongState("delete", job_id=job.pk, state=job.state, allowed="succeeded, failed, cancelled")
    Job.objects.filter(pk=job.pk, deleted_at__isnull=True).update(deleted_at=Now())
    job.refresh_from_db(fields=["deleted_at"])
    return job


def restore_job(job: Job) -> Job:
    Job.objects.filter(pk=job.pk).update(deleted_at=None)
    job.refresh_from_db(fields=["deleted_at"])
    return job


def purge_deleted_jobs() -> list[str]:
    """Remove jobs that were deleted KEPT ago or more, with their files; their ids."""
    oldest = timezone.now() - KEPT
    ids = list(Job.objects.filter(deleted_at__lt=oldest).values_list("pk", flat=True)[:100])
    for job_id in ids:
        shutil.rmtree(Path(settings.HEADROOM_HOME) / "jobs" / job_id, ignore_errors=True)
    Job.objects.filter(pk__in=ids).delete()
    return ids


def share_job(job: Job) -> str:
    """Path of the page that anyone may read; a job that is shared keeps its link."""
    Job.objects.filter(pk=job.pk, share_key="").update(share_key=secrets.token_urlsafe(16))
    job.refresh_from_db(fields=["share_key"])
    return shared_path(job)


def unshare_job(job: Job) -> None:
    """The link leads nowhere from now on, also when the job is shared again."""
    Job.objects.filter(pk=job.pk).update(share_key="")
    job.share_key = ""


def shared_path(job: Job) -> str:
    """Empty where the job is not shared."""
    return f"/shared/{job.pk}/{_signature(job)}/" if job.share_key else ""


def find_shared(job_id: str, signature: str) -> Job | None:
    """The job that such a link leads to; None where it was not shared or is deleted."""
    found = Job.objects.select_related("model", "dataset", "machine")
    job = found.filter(pk=job_id, deleted_at__isnull=True).exclude(share_key="").first()
    return job if job is not None and constant_time_compare(_signature(job), signature) else None


def _signature(job: Job) -> str:
    return Signer(salt="headroom.shared-run").signature(f"{job.pk}:{job.share_key}")


def save_filter(owner: Any, *, name: str, query: str) -> SavedFilter:
    """Keep a view of the list; one of the same name is replaced. Raises InvalidInput."""
    if len(query) > 1000:
        raise InvalidInput("the view has too many conditions to be kept", field="query", value=len(query))
    name = _read_name(name)[:60]
    return SavedFilter.objects.update_or_create(owner=owner, name=name, defaults={"query": query})[0]


def forget_filter(owner: Any, *, name: str) -> None:
    SavedFilter.objects.filter(owner=owner, name=name).delete()


def _read_name(name: str) -> str:
    text = " ".join(_read_text(name, field="name", longest=MAX_NAME).split())
    if not text:
        raise InvalidInput("the name is empty", field="name", value="", hint="Give it at least one letter.")
    return text


def _read_text(text: str, *, field: str, longest: int) -> str:
    if len(text) > longest or "\0" in text:
        raise InvalidInput(f"{field} has {len(text):,} characters; at most {longest:,} are kept", field=field, value=len(text))
    return text
