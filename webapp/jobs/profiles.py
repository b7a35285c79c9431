"""Asks for profiles by jobs, once for each architecture, and for each kind of adapters on it.

What such a job leaves is kept by ``webapp/catalog/actions.py``.
"""

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.profile.profile import PROFILE_VERSION, profile_fingerprint
from optimizer.serialize import to_json
from optimizer.workload import Adapter
from webapp.catalog.models import Model, Profile
from webapp.jobs.actions import create_job

_MODEL_FAULTS = ("bad_model", "unsupported_model_type", "invalid_workload")
"""Errors that the same trace would meet again; of a workload it is the adapters that the model cannot have."""
_TRY_AGAIN_AFTER = timedelta(minutes=1)


def request_profile(model: Model, *, adapter: Adapter | None = None) -> Profile:
    """The profile's row without its document, and a job that makes it unless there is one.

    Asked for again are a profile of another version of the program, and one whose making failed for a reason that lies not in
    the model (a lost worker, a full disk) a minute ago or more.
    """
    with transaction.atomic():
        profile, created = Profile.objects.defer("document").get_or_create(
            fingerprint=profile_fingerprint(model.fingerprint, adapter), defaults={"version": PROFILE_VERSION}
        )
        if not created and not (_is_due(profile) and _reset(profile)):
            return profile
        job = create_job(
            owner=model.owner,
            spec=_spec(model, adapter),
            model=model,
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


def _spec(model: Model, adapter: Adapter | None) -> dict[str, Any]:
    if adapter is None:
        return {"name": f"profile of {model.name}", "model": model.pk}
    return {"name": f"profile of {model.name} with adapters", "model": model.pk, "adapter": to_json(adapter)}


def _is_due(profile: Profile) -> bool:
    if profile.document_sha256:
        return profile.version != PROFILE_VERSION
    if profile.error is None or profile.error.get("code") in _MODEL_FAULTS:
        return False
    return timezone.now() - profile.updated_at > _TRY_AGAIN_AFTER


def _reset(profile: Profile) -> bool:
    """Guarded by what was read, so that of two that ask at once only one makes a job."""
    unchanged = Profile.objects.filter(pk=profile.pk, job_id=profile.job_id, updated_at=profile.updated_at)
    changes = {"document": None, "document_sha256": "", "error": None, "version": PROFILE_VERSION}
    if not unchanged.update(**changes, updated_at=Now()):
        return False
    profile.document_sha256, profile.error = "", None
    return True
