"""The profile of a model from wherever it is quickest: kept on disk, else traced in a child process and kept. Torch-free.

What was kept before and does not hold enough is traced as far as it is missing, and joined with the rest.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optimizer.base.serialize import to_json
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import COMPILED
from optimizer.profile.assemble.merge import merge_profiles
from optimizer.profile.extent import EVERYTHING, Extent
from optimizer.profile.fingerprints import profile_fingerprint
from optimizer.profile.generation import GenerationProfile
from optimizer.profile.keep.asking import TracingChild, ask_child
from optimizer.profile.keep.kept import (
    keep_generation_profile,
    keep_profile,
    read_kept_generation_profile,
    read_kept_profile,
)
from optimizer.profile.profile import BLOCK_CHOICES, Profile
from optimizer.workload import Adapter, TrainingObjective


def obtain_profile(
    spec: ModelSpec,
    *,
    adapter: Adapter | None = None,
    extent: Extent = EVERYTHING,
    is_padded: bool = False,
    is_packed: bool = False,
    objective: TrainingObjective = "next_token",
    folder: Path | None = None,
    num_sharing: int = 1,
) -> Profile:
    """A profile of at least what is asked for. is_padded, is_packed, objective, num_sharing: as ``profile_model`` takes them.
    folder: where profiles are kept, instead of ``kept.profiles_folder()``.

    Raises what ``profile_model`` raises, InvalidModel also where an operation cannot be traced at all, and ProfilingFailed
    where the process that traces ends without an answer.
    """
    with ProfileSource(
        spec,
        adapter=adapter,
        is_padded=is_padded,
        is_packed=is_packed,
        objective=objective,
        folder=folder,
        num_sharing=num_sharing,
    ) as source:
        return source.read(extent)


def obtain_generation_profile(
    spec: ModelSpec, *, representations: Sequence[str], folder: Path | None = None
) -> GenerationProfile:
    """The profile of a model that generates, with its weights in these representations. folder, and what is raised: as above."""
    kept = read_kept_generation_profile(spec.fingerprint, representations=representations, folder=folder)
    if kept is not None:
        return kept
    request = {"config": spec.to_config(), "representations": list(representations)}
    profile = GenerationProfile.from_json(ask_child(TracingChild(is_lean=True), request))
    keep_generation_profile(profile, folder=folder)
    return profile


class ProfileSource:
    """``obtain_profile`` in two steps: while the caller finds out what it needs, a child imports torch.

    To be entered, so that a child that was not needed is ended.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        adapter: Adapter | None = None,
        is_padded: bool = False,
        is_packed: bool = False,
        objective: TrainingObjective = "next_token",
        folder: Path | None = None,
        num_sharing: int = 1,
    ) -> None:
        self._spec, self._num_sharing = spec, num_sharing
        self._adapter = adapter
        self._is_padded = is_padded
        self._is_packed = is_packed
        self._objective = objective
        self._folder = folder
        part = spec.of_rank(num_sharing)
        fingerprint = profile_fingerprint(part.fingerprint, adapter, is_packed=is_packed, objective=objective)
        self._kept = read_kept_profile(fingerprint, is_padded=is_padded, folder=folder)
        self._child = self._start() if self._kept is None else None

    def __enter__(self) -> "ProfileSource":
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.end()

    def read(self, extent: Extent) -> Profile:
        """Read the profile, again and with more: every call may ask for something else."""
        if self._kept is not None and self._kept.covers(extent):
            return self._kept
        profile = self._trace(_whole_ranges(extent, self._kept))
        if self._kept is not None:
            profile = merge_profiles(self._kept, profile)
        keep_profile(profile, folder=self._folder)
        self._kept = profile
        return profile

    def _start(self) -> TracingChild:
        # peft, which makes adapters, does not import where little is.
        return TracingChild(is_lean=self._adapter is None)

    def _trace(self, extent: Extent) -> Profile:
        request = {
            "config": self._spec.to_config(),
            "adapter": to_json(self._adapter),
            "is_padded": self._is_padded,
            "is_packed": self._is_packed,
            "objective": self._objective,
            "extent": to_json(extent),
            "num_sharing": self._num_sharing,
        }
        child, self._child = self._child or self._start(), None
        if any(name.endswith(COMPILED) for name in extent.representations or ()):
            # It needs the compiler, which a child that imports little has not.
            child.end()
            child = TracingChild(is_lean=False)
        return Profile.from_json(ask_child(child, request))


def _whole_ranges(extent: Extent, kept: Profile | None) -> Extent:
    """The extent with the choices that are kept already, so that what is traced takes the place of what is there."""
    if kept is None or extent.choices is None:
        return extent
    known = {name for found in kept.regimes.values() for regime in found for name in regime.templates}
    choices = [choice for choice in BLOCK_CHOICES if choice in extent.choices or choice in known]
    return replace(extent, choices=tuple(choices))
