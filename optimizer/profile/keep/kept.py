"""Keeps profiles on disk, so that a model is traced once: under ``HEADROOM_HOME``, or in the user's cache without one.

A file's name says all that a profile depends on: the model with its adapters, the version of profiles, the versions of the
packages that were traced, and the files of this program that trace. It holds as much as was asked for so far. Files are written
whole or not at all; one that is damaged counts as none and is written again; the least recently used go when all together are
too large. Where the folder cannot be written, nothing is kept.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import typing
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from optimizer.base.cache_folder import cache_folder
from optimizer.base.errors import InvalidModel
from optimizer.formats.stock_layers import uses_memory_saving_layers
from optimizer.profile.generation import GENERATION_PROFILE_VERSION, GenerationProfile
from optimizer.profile.profile import PROFILE_VERSION, Profile

MAX_KEPT_BYTES = 256 * 1024**2
"""Most bytes of all files together: some hundreds of models."""
MAX_PARSED = 8
"""Profiles kept in the process."""
_parsed: dict[str, Any] = {}
_TRACED_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
_TRACING_FOLDERS = ("formats", "models", "plan", "profile", "runtime")
_SUFFIX = ".profile.json"
T = TypeVar("T")


def profiles_folder() -> Path:
    """``$HEADROOM_HOME/cache/profiles``, else ``headroom/profiles`` in the user's cache folder. It need not be there."""
    return cache_folder("profiles")


def read_kept_profile(fingerprint: str, *, is_padded: bool = False, folder: Path | None = None) -> Profile | None:
    """Read a kept profile. fingerprint: of the model with its adapters (``profile_fingerprint``). None where no whole
    file is there.
    """
    profile = _read(_training_path(fingerprint, folder, is_padded=is_padded), Profile.from_json)
    return profile if profile is not None and profile.model_fingerprint == fingerprint else None


def keep_profile(profile: Profile, *, folder: Path | None = None) -> None:
    """Keep a profile in place of what was kept of the model before."""
    _write_document(_training_path(profile.model_fingerprint, folder, is_padded=profile.is_padded), profile.to_json())


def read_kept_generation_profile(
    fingerprint: str, *, representations: Sequence[str], folder: Path | None = None
) -> GenerationProfile | None:
    """Read the kept profile with these representations and no others. None where no whole file is there."""
    profile = _read(_generation_path(fingerprint, representations, folder), GenerationProfile.from_json)
    return profile if profile is not None and profile.model_fingerprint == fingerprint else None


def keep_generation_profile(profile: GenerationProfile, *, folder: Path | None = None) -> None:
    """Keep a profile beside those of the model with other representations."""
    _write_document(_generation_path(profile.model_fingerprint, profile.representations, folder), profile.to_json())


def _read(path: Path, from_json: Callable[[Any], T]) -> T | None:
    try:
        text = path.read_text(encoding="utf-8")
        digest, _, body = text.partition("\n")
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            return None
        kept = _parse_once(digest, body, from_json)
    except (OSError, ValueError, InvalidModel):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return kept


def _parse_once(digest: str, body: str, from_json: Callable[[Any], T]) -> T:
    """Parsed documents stay in the process, by what is in them: reading one takes longer than pricing with it."""
    known = _parsed.pop(digest, None)
    found = from_json(json.loads(body)) if known is None else known
    _parsed[digest] = found
    while len(_parsed) > MAX_PARSED:
        _parsed.pop(next(iter(_parsed)), None)
    return typing.cast(T, found)


def _write_document(path: Path, document: Any) -> None:
    body = json.dumps(document, separators=(",", ":"))
    text = f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, text)
        _drop_oldest(path.parent)


def _training_path(fingerprint: str, folder: Path | None, *, is_padded: bool) -> Path:
    return _path_of(f"{fingerprint} padded" if is_padded else fingerprint, folder)


def _generation_path(fingerprint: str, representations: Sequence[str], folder: Path | None) -> Path:
    what = " ".join((fingerprint, "generates", *sorted(representations)))
    return _path_of(what, folder, profile_version=GENERATION_PROFILE_VERSION)


def _path_of(what: str, folder: Path | None, *, profile_version: int = PROFILE_VERSION) -> Path:
    versions = [_version_of(package) for package in _TRACED_PACKAGES]
    facts = [what, profile_version, uses_memory_saving_layers(), versions, _program_stamp()]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]
    return (folder or profiles_folder()) / f"{name}{_SUFFIX}"


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _program_stamp() -> list[list[str | int]]:
    """Name, size and time of each file that takes part in tracing: after an update nothing old is read."""
    root = Path(__file__).parents[2]
    files = [file for folder in _TRACING_FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    stats = [(file, file.stat()) for file in files]
    return [[file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _write_whole(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _drop_oldest(folder: Path) -> None:
    stats = sorted(((file.stat(), file) for file in folder.glob(f"*{_SUFFIX}")), key=lambda item: -item[0].st_mtime_ns)
    total_bytes = 0
    for stat, file in stats:
        total_bytes += stat.st_size
        if total_bytes > MAX_KEPT_BYTES:
            file.unlink(missing_ok=True)
