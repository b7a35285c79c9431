"""Asks for profiles by jobs, once for each architecture, for each kind of adapters on it, and for the model that generates."""

from datetime import timedelta

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import HeadroomError
from webapp.catalog.models import Profile
from webapp.jobs.actions import create_job
from webapp.planning.search.profiles import ProfileNeed

_MODEL_FAULTS = ("bad_model", "unsupported_model_type", "invalid_workload", "block_not_compiled")
"""Errors that the same trace would meet again; of a workload it is the adapters that the model cannot have."""
_TRY_AGAIN_AFTER = timedelta(minutes=1)


class ProfileFailed(HeadroomError):
    """The model could not be traced; carries the trace's own error."""

    code = "bad_model"


def ready_profile(need: ProfileNeed) -> Profile | None:
    """Its row, without the document; None while it is being made, which this asks for. Raises ProfileFailed."""
    profile = request_profile(need)
    if profile.error is not None and not profile.document_sha256:
        raise ProfileFailed(str(profile.error.get("message")), hint=str(profile.error.get("hint") or ""))
    return profile if profile.document_sha256 else None


def request_profile(need: ProfileNeed) -> Profile:
    """The profile's row without its document, and a job that makes it unless there is one.

    Asked for again are a profile of another version of the program, and one whose making failed for a reason that lies not in
    the model (a lost worker, a full disk) a minute ago or more.
    """
    with transaction.atomic():
        profile, created = Profile.objects.defer("document").get_or_create(
            fingerprint=need.fingerprint,
            defaults={"version": need.version, "model_fingerprint": need.model.fingerprint},
        )
        if not profile.model_fingerprint:  # of a row that is older than the column
            Profile.objects.filter(pk=profile.pk).update(model_fingerprint=need.model.fingerprint)
        if not created and not (_is_due(profile, need.version) and _reset(profile, need.version)):
            return profile
        job = create_job(
            owner=need.model.owner,
            project=need.model.project,
            spec=need.job_spec,
            model=need.model,
            dataset=None,
            plan=None,
            prediction=None,
            machine=None,
            kind="profile",
            actor="program",
        )
        Profile.objects.filter(pk=profile.pk).update(job_id=job.pk)
        profile.job_id = job.pk
    return profile


def _is_due(profile: Profile, version: int) -> bool:
    if profile.document_sha256:
        return profile.version != version
    if profile.error is None or profile.error.get("code") in _MODEL_FAULTS:
        return False
    return timezone.now() - profile.updated_at > _TRY_AGAIN_AFTER


def _reset(profile: Profile, version: int) -> bool:
    """Guarded by what was read, so that of two that ask at once only one makes a job."""
    unchanged = Profile.objects.filter(pk=profile.pk, job_id=profile.job_id, updated_at=profile.updated_at)
    changes = {"document": None, "document_sha256": "", "error": None, "version": version}
    if not unchanged.update(**changes, updated_at=Now()):
        return False
    profile.document_sha256, profile.error = "", None
    return True
