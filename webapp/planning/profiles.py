"""Profiles: asked for by jobs, once for each architecture and for each kind of adapters on it, and read when they are there.

What such a job leaves is kept by ``webapp/catalog/actions.py``.
"""

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from optimizer.base.errors import HeadroomError
from optimizer.base.serialize import to_json
from optimizer.goal import Goal
from optimizer.profile.generation import (
    INFERENCE_PROFILE_VERSION,
    GenerationProfile,
    generation_fingerprint,
    traced_fingerprint,
)
from optimizer.profile.profile import PROFILE_VERSION, profile_fingerprint
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.workload import Adapter, TrainingWorkload
from webapp.catalog.models import Model, Profile
from webapp.jobs.actions import create_job
from webapp.planning.searches import TrainingQuestion

if TYPE_CHECKING:
    from optimizer.search.questions.alternatives import Obtain

_MODEL_FAULTS = ("bad_model", "unsupported_model_type", "invalid_workload")
"""Errors that the same trace would meet again; of a workload it is the adapters that the model cannot have."""
_TRY_AGAIN_AFTER = timedelta(minutes=1)


class ProfileFailed(HeadroomError):
    """The model could not be traced; carries the trace's own error."""

    code = "bad_model"


def profile_of(model: Model, *, adapter: Adapter | None) -> ModelProfile | None:
    """None while it is being made, which this asks for. Raises ProfileFailed."""
    row = ready_profile(model, adapter=adapter)
    return None if row is None else read_profile(row.pk, row.document_sha256)


def known_profile_of(model: Model, adapter: Adapter | None) -> ModelProfile | None:
    """The same without asking for it: None unless it is there."""
    row = _known_row(profile_fingerprint(model.fingerprint, adapter), PROFILE_VERSION)
    return None if row is None else read_profile(row.pk, row.document_sha256)


def known_profiles_of(model: Model, question: TrainingQuestion) -> "Obtain":
    """For what would fit instead: the model's profile, and that with other adapters where it was made already."""

    def obtain(workload: TrainingWorkload, goal: Goal) -> ModelProfile | None:
        same = workload.adapter == question.workload.adapter
        return question.profile if same else known_profile_of(model, workload.adapter)

    return obtain


def known_generation_profile_of(model: Model) -> GenerationProfile | None:
    """The same of a model that generates."""
    row = _known_row(generation_fingerprint(model.fingerprint), INFERENCE_PROFILE_VERSION)
    return None if row is None else read_generation_profile(row.pk, row.document_sha256)


def _known_row(fingerprint: str, version: int) -> Profile | None:
    rows = Profile.objects.defer("document").filter(fingerprint=fingerprint, version=version)
    return rows.exclude(document_sha256="").first()


def ready_profile(model: Model, *, adapter: Adapter | None = None, generates: bool = False) -> Profile | None:
    """Its row, without the document; None while it is being made, which this asks for. Raises ProfileFailed."""
    profile = request_profile(model, adapter=adapter, generates=generates)
    if profile.error is not None and not profile.document_sha256:
        raise ProfileFailed(str(profile.error.get("message")), hint=str(profile.error.get("hint") or ""))
    return profile if profile.document_sha256 else None


@functools.lru_cache(maxsize=16)
def read_profile(fingerprint: str, document_sha256: str) -> ModelProfile:
    """Kept by its hash: each edit of the form prices again, and reading a profile takes longer than pricing with it."""
    return ModelProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)


@functools.lru_cache(maxsize=16)
def read_generation_profile(fingerprint: str, document_sha256: str) -> GenerationProfile:
    """Kept like those of training."""
    return GenerationProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)


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
