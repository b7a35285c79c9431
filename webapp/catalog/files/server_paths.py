"""Finds folders and files on the server that an administrator has opened to its users.

A path is allowed when the file that it really leads to lies under a root (``HEADROOM_MODEL_ROOTS``, ``HEADROOM_DATASET_ROOTS``),
in no hidden folder below that root, and not in ``HEADROOM_HOME``, which holds what belongs to others. Paths outside are all
answered alike, so that nobody learns from an answer what lies there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from optimizer.base.errors import InvalidInput

MAX_PATH_CHARACTERS = 1_000


class PathNotAllowed(InvalidInput):
    """The path leads out of the folders that are open, or is none."""

    code = "path_not_allowed"


def find_on_server(path: str, *, roots: Sequence[Path], variable: str, field: str = "path") -> Path:
    """The real path of a file or folder that is there. Raises PathNotAllowed.

    roots: the folders that are open; variable: the name of the setting that lists them, for people.
    """
    if not roots:
        raise _refusal(
            "no folder of this server is open",
            path,
            field=field,
            allowed="an upload",
            hint=f"An administrator opens folders with {variable}.",
        )
    given = Path(path)
    if not 0 < len(path) <= MAX_PATH_CHARACTERS or not path.isprintable() or not given.is_absolute():
        allowed = f"an absolute path of at most {MAX_PATH_CHARACTERS:,} printable characters"
        raise _refusal(f"{field} is {path[:80]!r}", path, field=field, allowed=allowed)
    real = _resolve(given)
    if real is None or not is_open(real, roots=roots):
        raise _refusal(
            f"{path[:200]} is not there, or outside of the folders that are open",
            path,
            field=field,
            allowed=f"below {', '.join(str(root) for root in roots)}, in no hidden folder",
            hint=f"An administrator opens folders with {variable}.",
        )
    return real


def find_beside(folder: Path, name: str, *, roots: Sequence[Path]) -> Path | None:
    """The real path of a file in a folder that was found; None where it is not there.

    Raises PathNotAllowed where a link leads out.
    """
    given = folder / name
    if not given.is_symlink() and not given.exists():
        return None
    real = _resolve(given)
    if real is None or not real.is_file():
        raise _refusal(f"{name} in {folder} is no file", name, field="path", allowed="a file, or a link to one")
    if not is_open(real, roots=roots):
        raise _refusal(
            f"{name} in {folder} is a link that leads out of the folders that are open",
            name,
            field="path",
            allowed=f"files below {', '.join(str(root) for root in roots)}",
        )
    return real


def is_open(real: Path, *, roots: Sequence[Path]) -> bool:
    """Report whether a path without links lies under a root, in no hidden folder below it, and not in HEADROOM_HOME."""
    home = Path(settings.HEADROOM_HOME).resolve()
    return not real.is_relative_to(home) and any(_is_under(real, root) for root in roots)


def _is_under(real: Path, root: Path) -> bool:
    real_root = _resolve(root)
    if real_root is None or not real.is_relative_to(real_root):
        return False
    return not any(part.startswith(".") for part in real.relative_to(real_root).parts)


def _resolve(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # gone, a circle of links, a byte that no path may have
        return None


def _refusal(found: str, path: str, *, field: str, allowed: Any, hint: str = "") -> PathNotAllowed:
    return PathNotAllowed(f"{found}; allowed: {allowed}", field=field, value=path[:200], allowed=allowed, hint=hint)
