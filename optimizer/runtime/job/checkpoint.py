"""Resumable checkpoints on disk: safetensors and JSON only, whole or not there.

Written in a staged folder, each file synced, the manifest with every file's sha256 last, then renamed and the parent synced:
a crash at any moment leaves the checkpoints before it as they were. Loading checks sizes and hashes first; nothing is ever
unpickled. What the tensors mean is the caller's business (``train.py``).

An attempt that lost its job and has not noticed may write at the same time: each touches only what attempts of its own fence and
older ones left, and a newer attempt's checkpoints come first whatever their step, because it would have gone on from a later step
had that been there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from optimizer.base.disk import disk_floor_bytes
from optimizer.base.errors import CheckpointInvalid, DiskFull, InvalidInput
from optimizer.base.serialize import from_json, to_json
from optimizer.base.units import format_bytes

if TYPE_CHECKING:
    import torch

    from optimizer.models.files.tensor_files import TensorEntry
    from optimizer.runtime.tiers.homes import LaterTensor

CHECKPOINTS_FOLDER = "checkpoints"
NUM_KEPT = 3
MANIFEST_VERSION = 1
_MANIFEST = "manifest.json"
_FACTS = "facts.json"
_STAGED_PREFIX = ".tmp-"
_NAME = re.compile(r"step-(?P<step>\d{6,})-f(?P<fence>\d+)")

TensorGroups = Mapping[str, Mapping[str, "torch.Tensor | LaterTensor"]]


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts that a checkpoint must hold to be used."""

    version: int
    step: int
    """Optimizer steps done."""
    fence: int
    """Fence of the attempt that wrote it."""
    plan_fingerprint: str
    files: dict[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A checkpoint that is on disk for good."""

    step: int
    folder: str
    """Relative to the job's folder."""
    manifest_sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files verified."""

    folder: Path
    manifest: Manifest
    facts: dict[str, Any]

    def has(self, group: str) -> bool:
        """Report whether there is a group of tensors of this name."""
        return f"{group}.safetensors" in self.manifest.files

    def load(self, group: str) -> Mapping[str, "torch.Tensor"]:
        """The tensors of one group, each read when it is asked for; copy what is to stay."""
        return _TensorFile(self.folder / f"{group}.safetensors")


class _TensorFile(Mapping[str, "torch.Tensor"]):
    """A safetensors file, of which one tensor at a time is in host memory."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt", device="cpu")
        self._names: list[str] = sorted(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> "torch.Tensor":
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        # A mapping asks for the item otherwise, and reads it, or meets safetensors' own error, which is no KeyError.
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_checkpoint(
    job_folder: Path,
    *,
    step: int,
    fence: int,
    plan_fingerprint: str,
    tensors: TensorGroups,
    facts: Mapping[str, Any],
) -> WrittenCheckpoint:
    """Write one, then drop all but the newest ``NUM_KEPT`` of this fence and older ones. Raises DiskFull and leaves nothing
    half-written.

    tensors: by group, each a file; written one by one, so that no more than one is copied at a time. facts: JSON-able.
    """
    parent = job_folder / CHECKPOINTS_FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    _clear_staged(parent, fence=fence)
    needed_bytes = sum(tensor.nbytes for group in tensors.values() for tensor in group.values()) + disk_floor_bytes()
    _require_free(parent, needed_bytes)
    name = f"step-{step:06d}-f{fence}"
    staged = parent / f"{_STAGED_PREFIX}{name}"
    with _disk_full_is_named(parent, needed_bytes):
        try:
            manifest_bytes = _write_files(staged, step, fence, plan_fingerprint, tensors, facts)
            num_bytes = sum(file.stat().st_size for file in staged.iterdir())
            _replace(staged, parent / name)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    _drop_old(parent, fence=fence)
    return WrittenCheckpoint(
        step=step,
        folder=f"{CHECKPOINTS_FOLDER}/{name}",
        manifest_sha256=hashlib.sha256(manifest_bytes).hexdigest(),
        num_bytes=num_bytes,
    )


def find_resumable(job_folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies; None when none was ever written.

    Raises CheckpointInvalid when there are some and every one is damaged.
    """
    first_fault: CheckpointInvalid | None = None
    for folder in list_checkpoints(job_folder):
        try:
            return read_checkpoint(folder)
        except CheckpointInvalid as error:
            first_fault = first_fault or error
    if first_fault is not None:
        raise first_fault
    return None


def list_checkpoints(job_folder: Path) -> list[Path]:
    """Newest first: by fence, then by step. Staged ones are not among them."""
    return _sorted_checkpoints(job_folder / CHECKPOINTS_FOLDER)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check every file against the manifest. Raises CheckpointInvalid that names the first file that is wrong."""
    try:
        document = json.loads((folder / _MANIFEST).read_bytes())
        _refuse_newer(folder, document)
        manifest = from_json(Manifest, document, path="manifest")
    except (OSError, ValueError, InvalidInput) as error:
        raise _invalid(folder, f"its manifest cannot be read ({error})") from error
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            raise _invalid(folder, f"{name} is missing or not {entry.num_bytes:,} bytes long")
        if hash_file(path) != entry.sha256:
            raise _invalid(folder, f"{name} does not have the sha256 of its manifest")
    facts = json.loads((folder / _FACTS).read_bytes())
    return Checkpoint(folder=folder, manifest=manifest, facts=facts)


def _refuse_newer(folder: Path, document: Any) -> None:
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise _invalid(
            folder,
            f"a newer release of Headroom wrote it (manifest of version {version}; this one reads to {MANIFEST_VERSION})",
            hint="Go on with the newer release.",
        )


def hash_file(path: Path) -> str:
    """sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_files(
    staged: Path, step: int, fence: int, plan_fingerprint: str, tensors: TensorGroups, facts: Mapping[str, Any]
) -> bytes:
    staged.mkdir()
    files: dict[str, FileEntry] = {}
    for group, members in tensors.items():
        # torch takes seconds to import, and a job without tensors goes without it
        from optimizer.models.files.tensor_files import write_tensors

        path = staged / f"{group}.safetensors"
        write_tensors([_entry(name, members[name]) for name in sorted(members)], folder=staged, stem=group)
        files[path.name] = _settle(path)
    path = staged / _FACTS
    path.write_text(json.dumps(facts, sort_keys=True))
    files[path.name] = _settle(path)
    manifest = Manifest(
        version=MANIFEST_VERSION, step=step, fence=fence, plan_fingerprint=plan_fingerprint, files=files
    )
    path = staged / _MANIFEST
    content = json.dumps(to_json(manifest), indent=1).encode()
    path.write_bytes(content)
    _settle(path)
    sync_folder(staged)
    return content


def _entry(name: str, tensor: "torch.Tensor | LaterTensor") -> "TensorEntry":
    import torch

    from optimizer.models.files.tensor_files import TensorEntry

    read = tensor.detach if isinstance(tensor, torch.Tensor) else tensor.load
    return TensorEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=read)


def _settle(path: Path) -> FileEntry:
    """Put a written file on the disk for good, and say what it is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(sha256=hash_file(path), num_bytes=path.stat().st_size)


def _replace(staged: Path, final: Path) -> None:
    if final.exists():
        # The same attempt wrote this step before; the content is the same, and a rename cannot replace a full folder.
        shutil.rmtree(final)
    staged.rename(final)
    sync_folder(final.parent)


def _drop_old(parent: Path, *, fence: int) -> None:
    """The newest of those up to this fence is the one just written, so it always stays."""
    for folder in _sorted_checkpoints(parent, up_to_fence=fence)[NUM_KEPT:]:
        # The manifest goes first: a folder that is half gone must not look like a checkpoint.
        (folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # an attempt that lost the job may be removing the same


def _clear_staged(parent: Path, *, fence: int) -> None:
    for folder in parent.glob(f"{_STAGED_PREFIX}*"):
        match = _NAME.fullmatch(folder.name.removeprefix(_STAGED_PREFIX))
        if match is not None and int(match["fence"]) <= fence:
            shutil.rmtree(folder, ignore_errors=True)


def _sorted_checkpoints(parent: Path, *, up_to_fence: int | None = None) -> list[Path]:
    found: list[tuple[int, int, Path]] = []
    for folder in parent.iterdir() if parent.is_dir() else ():
        match = _NAME.fullmatch(folder.name)
        if match is not None and (up_to_fence is None or int(match["fence"]) <= up_to_fence):
            found.append((int(match["fence"]), int(match["step"]), folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def _require_free(parent: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise _disk_full(free_bytes, needed_bytes)


@contextmanager
def _disk_full_is_named(parent: Path, needed_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(shutil.disk_usage(parent).free, needed_bytes) from error


def _disk_full(free_bytes: int, needed_bytes: int) -> DiskFull:
    return DiskFull(
        f"a checkpoint needs {format_bytes(needed_bytes)} of disk, {format_bytes(disk_floor_bytes())} of which stay free; "
        f"{format_bytes(free_bytes)} are free",
        hint="Free disk space or move HEADROOM_HOME; the job resumes from its last checkpoint.",
        free_bytes=free_bytes,
        needed_bytes=needed_bytes,
        floor_bytes=disk_floor_bytes(),
    )


def _invalid(
    folder: Path, what: str, *, hint: str = "Delete the folder; the job then resumes from the one before."
) -> CheckpointInvalid:
    return CheckpointInvalid(f"checkpoint {folder.name} cannot be used: {what}", hint=hint, folder=folder.name)
