"""Profiles that are kept: which a price needs, and reading them. ``profile_requests.py`` asks for those that are not there.

What a profile job leaves is kept by ``webapp/catalog/actions.py``.
"""

import functools
from dataclasses import dataclass
from typing import Any

from optimizer.base.serialize import to_json
from optimizer.profile.fingerprints import traced_fingerprint
from optimizer.profile.generation import GENERATION_PROFILE_VERSION, GenerationProfile
from optimizer.profile.profile import PROFILE_VERSION
from optimizer.profile.profile import Profile as ModelProfile
from optimizer.workload import Adapter, TrainingObjective, TrainingWorkload
from webapp.catalog.models import Model, Profile


@dataclass(frozen=True, kw_only=True)
class ProfileNeed:
    """The profile of a model that a price needs: with adapters beside it, or of the model that generates, which has none."""

    model: Model
    adapter: Adapter | None = None
    generates: bool = False
    is_packed: bool = False
    """True for rows of samples that do not attend to each other."""
    objective: TrainingObjective = "next_token"
    compiled: tuple[str, ...] = ()
    """Representations of the weights in which compiled blocks are traced too, at some seconds each."""
    sharing: int = 1
    """Devices that share each block, the part of one of which is traced too."""

    @classmethod
    def of_training(
        cls, model: Model, workload: TrainingWorkload, *, compiled: tuple[str, ...] = (), sharing: int = 1
    ) -> "ProfileNeed":
        """compiled, sharing: as the fields, by ``compiled_representations`` and ``shared_number``."""
        return cls(
            model=model,
            adapter=workload.adapter,
            is_packed=workload.is_packed,
            objective=workload.objective,
            compiled=compiled,
            sharing=sharing,
        )

    @property
    def fingerprint(self) -> str:
        return traced_fingerprint(
            self.model.fingerprint,
            adapter=self.adapter,
            generates=self.generates,
            is_packed=self.is_packed,
            objective=self.objective,
            compiled=self.compiled,
            sharing=self.sharing,
        )

    @property
    def version(self) -> int:
        """Profile version of the program that must have made it."""
        return GENERATION_PROFILE_VERSION if self.generates else PROFILE_VERSION

    @property
    def job_spec(self) -> dict[str, Any]:
        """Spec of the job that makes it."""
        name = f"profile of {self.model.name}"
        if self.generates:
            return {"name": f"{name} that generates", "model": self.model.pk, "generates": True}
        spec: dict[str, Any] = {"name": name, "model": self.model.pk}
        if self.adapter is not None:
            spec |= {"name": f"{name} with adapters", "adapter": to_json(self.adapter)}
        if self.objective != "next_token":
            spec |= {"name": f"{spec['name']}, {self.objective}", "objective": self.objective}
        if self.is_packed:
            spec |= {"name": f"{spec['name']}, packed", "packed": True}
        if self.compiled:
            spec |= {"name": f"{spec['name']}, with compiled blocks", "compiled": list(self.compiled)}
        if self.sharing > 1:
            spec |= {"name": f"{spec['name']}, shared by {self.sharing}", "sharing": self.sharing}
        return spec

    def find_row(self) -> Profile | None:
        """Without its document; None where it was not made, or by another version."""
        rows = Profile.objects.defer("document").filter(fingerprint=self.fingerprint, version=self.version)
        return rows.exclude(document_sha256="").first()


def known_profile_of(
    model: Model, workload: TrainingWorkload, *, compiled: tuple[str, ...] = (), sharing: int = 1
) -> ModelProfile | None:
    """The model's profile for such training; None unless it is there. Asks for nothing. compiled, sharing: as ``of_training``
    has them.
    """
    row = ProfileNeed.of_training(model, workload, compiled=compiled, sharing=sharing).find_row()
    return None if row is None else read_profile(row.pk, row.document_sha256)


def known_generation_profile_of(model: Model) -> GenerationProfile | None:
    """The same of a model that generates."""
    row = ProfileNeed(model=model, generates=True).find_row()
    return None if row is None else read_generation_profile(row.pk, row.document_sha256)


@functools.lru_cache(maxsize=16)
def read_profile(fingerprint: str, document_sha256: str) -> ModelProfile:
    """Kept by its hash: each edit of the form prices again, and reading a profile takes longer than pricing with it."""
    return ModelProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)


@functools.lru_cache(maxsize=16)
def read_generation_profile(fingerprint: str, document_sha256: str) -> GenerationProfile:
    """Kept like those of training."""
    return GenerationProfile.from_json(Profile.objects.get(fingerprint=fingerprint).document)
