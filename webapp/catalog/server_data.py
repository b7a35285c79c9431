"""Makes a dataset of a file or a folder on the server, which is copied: the file may change afterwards, the dataset does not."""

import tempfile
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidDataset
from optimizer.data.samples.gather import list_data_files
from webapp.catalog.actions import create_dataset
from webapp.catalog.files.kept_file import KeptFile
from webapp.catalog.files.limited import run_limited
from webapp.catalog.files.room import require_room
from webapp.catalog.files.server_paths import find_on_server
from webapp.catalog.models import Dataset

VARIABLE = "HEADROOM_DATASET_ROOTS"
_TIMEOUT_S = 600


def dataset_roots() -> list[Path]:
    return list(settings.HEADROOM_DATASET_ROOTS)


def create_dataset_of_path(*, owner: User | None, name: str, path: str, columns: Any = None) -> Dataset:
    """A dataset of what lies at ``path``: one file, or all dataset files of a folder as one.

    Raises PathNotAllowed, InvalidDataset that names the file and the line, DiskFull.
    """
    roots = dataset_roots()
    real = find_on_server(path, roots=roots, variable=VARIABLE)
    listed = list_data_files(real) if real.is_dir() else [real]
    # links may lead out of what is open
    files = [find_on_server(str(file), roots=roots, variable=VARIABLE) for file in listed]
    require_room(2 * sum(file.stat().st_size for file in files), promised_bytes=0)
    with tempfile.TemporaryDirectory(prefix="gather-", dir=settings.FILE_UPLOAD_TEMP_DIR) as folder:
        owner_id = owner.pk if owner else None
        gathered = _gather(files, Path(folder), owner_id=owner_id) if real.is_dir() else _copied(real, Path(folder))
        with KeptFile(gathered, name=gathered.name) as file:
            return create_dataset(owner=owner, name=name or real.stem, file=file, columns=columns)


def _gather(files: list[Path], folder: Path, *, owner_id: int | None) -> Path:
    arguments = [str(folder / "gathered"), *map(str, files)]
    answer = run_limited(
        "optimizer.data.samples.gather",
        arguments,
        field="path",
        error=InvalidDataset,
        owner_id=owner_id,
        timeout_s=_TIMEOUT_S,
    )
    return Path(answer["file"])


def _copied(file: Path, folder: Path) -> Path:
    copy = folder / file.name
    with file.open("rb") as source, copy.open("xb") as out:
        while block := source.read(1 << 20):
            out.write(block)
    return copy
