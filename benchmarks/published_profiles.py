"""Profiles of published models: traced once for each shape, kept in a folder where one is given."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.published_generations import PublishedGeneration
from benchmarks.published_models import PublishedModel
from benchmarks.published_rows import PublishedRow
from optimizer.errors import HeadroomError
from optimizer.profile.inference import InferenceProfile
from optimizer.profile.inference_trace import profile_inference
from optimizer.profile.profile import Profile
from optimizer.profile.trace import profile_model


class _Kept(Protocol):
    def to_json(self) -> dict[str, Any]: ...


Traced = TypeVar("Traced", bound=_Kept)


class Profiles:
    """Rows of one shape stand together in the files, so only the last profile is held."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: tuple[str, object] | None = None

    def training(self, row: PublishedRow) -> Profile:
        def trace() -> Profile:
            return profile_model(row.spec(), adapter=row.workload().adapter)

        return self._of(row, row.representation, read=Profile.from_json, trace=trace)

    def generation(self, row: PublishedGeneration) -> InferenceProfile:
        def trace() -> InferenceProfile:
            return profile_inference(row.spec(), representations=[row.representation])

        return self._of(row, f"generation {row.representation}", read=InferenceProfile.from_json, trace=trace)

    def _of(
        self, row: PublishedModel, what: str, *, read: Callable[[Any], Traced], trace: Callable[[], Traced]
    ) -> Traced:
        key = hashlib.sha256(repr((row.shape_key, what, torch.__version__)).encode()).hexdigest()[:16]
        if self._held is not None and self._held[0] == key:
            return self._held[1]  # type: ignore[return-value]
        file = self._folder / f"{key}.json" if self._folder else None
        profile = _read(file, read)
        if profile is None:
            print(f"tracing {row.model} ({what}) ...", file=sys.stderr, flush=True)
            profile = trace()
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(profile.to_json()))
        self._held = (key, profile)
        return profile


def _read(file: Path | None, read: Callable[[Any], Traced]) -> Traced | None:
    """None where there is no such file, or one of another version."""
    if file is None or not file.exists():
        return None
    try:
        return read(json.loads(file.read_text()))
    except (ValueError, HeadroomError):
        return None
