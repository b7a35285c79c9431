"""Asks for profiles by jobs, once for each architecture, and for each kind of adapters on it.

What such a job leaves is kept by ``webapp/catalog/actions.py``.
"""

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.profile.inference import INFERENCE_PROFILE_VERSION, traced_fingerprint
from optimizer.profile.profile import PROFILE_VERSION
from optimizer.serialize import to_json
from optimizer.workload import Adapter
from webapp.catalog.models import Model, Profile
from webapp.jobs.actions import create_job

_MODEL_FAULTS = ("bad_model", "unsupported_model_type", "invalid_workload")
"""Errors that the same trace would meet again; of a workload it is the adapters that the model cannot have."""
_TRY_AGAIN_AFTER = timedelta(minutes=1)


def request_profile(model: Model, *, adapter: Adapter | None = None, generates: bool = False) -> Profile:
    """The profile's row without its document, and a job that makes it unless there is one.

    generates: of the model that generates, which has no adapters beside it.

    Asked for again are a profile of another version of the program, and one whose making failed for a reason that lies not in
    the model (a lost worker, a full disk) a minute ago or more.
    """
    version = INFERENCE_PROFILE_VERSION if generates else PROFILE_VERSION
    with transaction.atomic():
        profile, created = Profile.objects.defer("document").get_or_create(
            fingerprint=traced_fingerprint(model.fingerprint, adapter=adapter, generates=generates),
            defaults={"version": version},
        )
        if not created and not (_is_due(profile, version) and _reset(profile, version)):
            return profile
        job = create_job(
            owner=model.owner,
            project=model.project,
            spec=_spec(model, adapter, generates=generates),
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


def _spec(model: Model, adapter: Adapter | None, *, generates: bool) -> dict[str, Any]:
    if generates:
        return {"name": f"profile of {model.name} that generates", "model": model.pk, "generates": True}
    if adapter is None:
        return {"name": f"profile of {model.name}", "model": model.pk}
    return {"name": f"profile of {model.name} with adapters", "model": model.pk, "adapter": to_json(adapter)}


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
