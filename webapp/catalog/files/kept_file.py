"""A file that is on this disk already, as the actions take an upload: with a path, so that keeping it is a link and no copy."""

from pathlib import Path

from django.core.files.uploadedfile import UploadedFile


class KeptFile(UploadedFile):  # type: ignore[type-arg]  # at run time it takes no argument
    """Open until it is closed."""

    def __init__(self, path: Path, *, name: str) -> None:
        super().__init__(path.open("rb"), name=name, size=path.stat().st_size)
        self._kept_at = path

    def temporary_file_path(self) -> str:
        return str(self._kept_at)
