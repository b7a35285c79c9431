"""Makes a model of a folder on the server: its weights stay there and are linked, its small files are copied.

Only headers are read, so that 16 GB take a moment. Which files are taken is decided by fixed names and by the index, whatever
else lies in the folder; each must lie, links followed, below a root that is open.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile

from optimizer.base.errors import InvalidModel
from optimizer.models.files.check_weights import INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, read_index
from optimizer.models.files.sidecars import MAX_TEMPLATES, SIDECAR_NAMES, TEMPLATES_FOLDER, is_sidecar
from webapp.catalog.actions import create_model
from webapp.catalog.files.model_parts import GGUF_FILE, GGUF_SUFFIX, sidecar_limit_bytes
from webapp.catalog.files.server_paths import PathNotAllowed, find_beside, find_on_server
from webapp.catalog.models import Model

VARIABLE = "HEADROOM_MODEL_ROOTS"
MAX_ENTRIES = 20_000
"""Entries of a folder that are looked at for weights without an index."""


class PathDiffers(PathNotAllowed):
    """The server's folder is not the one that the asker sees: another machine."""

    code = "path_differs"


def model_roots() -> list[Path]:
    return list(settings.HEADROOM_MODEL_ROOTS)


def link_model(*, owner: User | None, name: str, path: str, seen: Mapping[str, Any] | None = None) -> Model:
    """A model whose weights stay in ``path``: a folder, or one GGUF file.

    seen: ``{name: [bytes, time of change in ns]}`` of files as the asker sees them; where the server's differ, the path means
    another machine's folder. Raises PathNotAllowed, PathDiffers, and what ``create_model`` raises.
    """
    roots = model_roots()
    real = find_on_server(path, roots=roots, variable=VARIABLE)
    folder = real if real.is_dir() else real.parent
    _check_seen(folder, seen or {}, roots)
    weights = _find_weights(real, roots)
    index = find_beside(folder, INDEX_FILE, roots=roots) if any(name.endswith(".safetensors") for name in weights) else None
    config = find_beside(folder, "config.json", roots=roots)
    if config is None and GGUF_FILE not in weights:
        raise _refusal(f"{folder} holds no config.json", allowed="a Hugging Face model's folder, or a GGUF file")
    if not weights:
        raise _refusal(f"{folder} holds no weights", allowed=f"*.safetensors with {INDEX_FILE}, or one *.gguf")
    with ExitStack() as opened:
        return create_model(
            owner=owner,
            name=name,
            config=None if config is None else opened.enter_context(_opened(config, "config.json")),
            sidecars={name: opened.enter_context(_opened(file, name)) for name, file in _find_sidecars(folder, roots).items()},
            links=weights | ({} if index is None else {INDEX_FILE: index}),
            linked_from=str(real),
        )


def _find_weights(real: Path, roots: Sequence[Path]) -> dict[str, Path]:
    """Real paths by the names that they get. Raises InvalidModel, PathNotAllowed."""
    if real.is_file():
        if real.suffix != GGUF_SUFFIX:
            raise PathNotAllowed(f"{real.name} is no folder; allowed: a model's folder, or one *.gguf", field="path")
        return {GGUF_FILE: real}
    index = find_beside(real, INDEX_FILE, roots=roots)
    if index is not None:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise _refusal(f"{INDEX_FILE} is too large", allowed=f"at most {MAX_INDEX_BYTES:,} bytes")
        names = sorted(set(read_index(index, may_link=True).values()))
        return {name: _required(real, name, roots) for name in names}
    names = _listed(real, ".safetensors")
    if SINGLE_FILE in names or len(names) == 1:
        return {SINGLE_FILE: _required(real, SINGLE_FILE if SINGLE_FILE in names else names[0], roots)}
    if names:
        found = f"{real} holds {len(names)} safetensors files without {INDEX_FILE}"
        raise _refusal(found, allowed="one, or shards with their index")
    packed = _listed(real, GGUF_SUFFIX)
    if len(packed) > 1:
        raise _refusal(f"{real} holds {len(packed)} GGUF files", allowed="one; name the file itself")
    return {GGUF_FILE: _required(real, packed[0], roots)} if packed else {}


def _listed(folder: Path, suffix: str) -> list[str]:
    """Names with this ending among the first entries of a folder."""
    names = []
    for number, path in enumerate(folder.iterdir()):
        if number >= MAX_ENTRIES:
            raise _refusal(f"{folder} holds more than {MAX_ENTRIES:,} entries", allowed="a model's folder")
        if path.name.endswith(suffix):
            names.append(path.name)
    return sorted(names)


def _required(folder: Path, name: str, roots: Sequence[Path]) -> Path:
    found = find_beside(folder, name, roots=roots)
    if found is None:
        raise _refusal(f"{INDEX_FILE} names {name}, which is not there", allowed="files of the folder")
    return found


def _find_sidecars(folder: Path, roots: Sequence[Path]) -> dict[str, Path]:
    names = list(SIDECAR_NAMES)
    if (folder / TEMPLATES_FOLDER).is_dir():
        templates = find_on_server(str(folder / TEMPLATES_FOLDER), roots=roots, variable=VARIABLE)
        listed = [f"{TEMPLATES_FOLDER}/{name}" for name in _listed(templates, ".jinja")]
        names += [name for name in listed if is_sidecar(name)][:MAX_TEMPLATES]
    found = {name: find_beside(folder, name, roots=roots) for name in names}
    return {name: file for name, file in found.items() if file is not None}


def _check_seen(folder: Path, seen: Mapping[str, Any], roots: Sequence[Path]) -> None:
    for name, expected in seen.items():
        file = find_beside(folder, name, roots=roots) if Path(name).name == name else None
        stat = None if file is None else file.stat()
        if stat is None or [stat.st_size, stat.st_mtime_ns] != expected:
            raise PathDiffers(
                f"{folder} on the server is another folder than the one that was meant: {name[:80]} differs",
                field="path",
                value=str(folder),
                allowed="the same folder, seen from the same machine",
                hint="Upload it.",
            )


def _refusal(found: str, *, allowed: str) -> InvalidModel:
    return InvalidModel(f"{found}; allowed: {allowed}", field="path", value=found, allowed=allowed)


class _Copied(UploadedFile):  # type: ignore[type-arg]  # at run time it takes no argument
    """A user's file, which is copied; without a path of its own, so that keeping it is never a link."""


def _opened(file: Path, name: str) -> _Copied:
    limit_bytes = sidecar_limit_bytes(name)
    num_bytes = file.stat().st_size
    if num_bytes > limit_bytes:
        raise _refusal(f"{name} has {num_bytes:,} bytes", allowed=f"at most {limit_bytes:,}")
    return _Copied(file.open("rb"), name=name, size=num_bytes)
