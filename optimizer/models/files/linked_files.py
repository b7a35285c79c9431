"""Notes what the files behind a folder's links are, and finds out later whether they still are. Torch-free; reads headers only.

A model that was linked has its weights where its owner keeps them. A job must not train on other numbers than those that were
added, so size, time of change and the hash of the header are compared before a file is opened.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel

_HASHED_BYTES = 1024 * 1024
"""Bytes at the beginning of a file that is no safetensors."""
_MAX_HEADER_BYTES = 16 * 10**6
_HINT = "Add the model again, and start the job with that one."


def describe_links(folder: str | Path) -> list[dict[str, Any]]:
    """Name, real path, size, time of change and hash of the header of each link in a folder; JSON-able."""
    links = sorted(path for path in Path(folder).iterdir() if path.is_symlink())
    return [{"name": path.name, "path": str(path.resolve()), **_state(path), "header_sha256": _header(path)} for path in links]


def check_links(folder: str | Path, noted: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidModel, naming the first file that is gone or is not what ``describe_links`` noted."""
    for file in noted:
        path = Path(folder) / file["name"]
        try:
            state = _state(path)
            is_same = state == {key: file[key] for key in state} and _header(path) == file["header_sha256"]
        except OSError as error:
            raise _lost(file, f"cannot be read any more ({error.strerror})") from error
        if not is_same:
            was, now = file["num_bytes"], state["num_bytes"]
            how = f"{was:,} bytes then, {now:,} now" if was != now else "written again with the same size"
            raise _lost(file, f"has changed since the model was added: {how}")


def checked_folder(folder: str | None, noted: Sequence[Mapping[str, Any]]) -> Path | None:
    """The folder once its links are checked; None for a model without weights. Raises InvalidModel."""
    if folder is None:
        return None
    check_links(folder, noted)
    return Path(folder)


def _state(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"num_bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}


def _header(path: Path) -> str:
    with path.open("rb") as stream:
        start = stream.read(8)
        num_bytes = int.from_bytes(start, "little") if path.suffix == ".safetensors" else _HASHED_BYTES
        return hashlib.sha256(start + stream.read(min(num_bytes, _MAX_HEADER_BYTES))).hexdigest()


def _lost(file: Mapping[str, Any], what: str) -> InvalidModel:
    return InvalidModel(
        f"weights file {file['path']} {what}",
        field=f"weights.{file['name']}",
        value=file["path"],
        allowed="the file that was added",
        hint=_HINT,
    )


def linked_bytes(noted: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the files behind the links, as they were noted."""
    return sum(int(file["num_bytes"]) for file in noted)
