"""Names the folder where inductor keeps machine code of kernels between runs, and another one where a file there is broken.

Inductor writes a library where it is to be found, so a process that is killed meanwhile leaves half of one, which every later run
would find. Torch's own choice is a folder under /tmp, which a reboot empties and other users see.

The folder is bounded: what was not used for longest goes first. A process that loses a file as it reads it goes on in an empty
folder, too.
"""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

from optimizer.base.cache_folder import cache_folder

_SETTING: Final = "TORCHINDUCTOR_CACHE_DIR"
_BROKEN: Final = ("ImportError", "FileNotFoundError")
"""Parts of the message where a library does not load, or has gone."""
MAX_KEPT_BYTES: Final = 512 * 1024**2
"""Most bytes of all kernels together: some hundreds of kinds of blocks, of one or two megabytes each."""


def choose_cache() -> None:
    """Keep kernels in this program's cache, unless somebody else has set another folder. Torch sets its own once it was asked."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_SETTING, "") in ("", default_cache_dir()):
        os.environ[_SETTING] = str(cache_folder("compiled"))


def keep_kernels_in(folder: Path, *, most_bytes: int = MAX_KEPT_BYTES) -> None:
    """Have this process keep kernels there, with those of other processes, and make room first."""
    drop_unused(folder, most_bytes=most_bytes)
    os.environ[_SETTING] = str(folder)


def drop_unused(folder: Path, *, most_bytes: int) -> None:
    """Remove the files that were read or written least recently until the others are within the limit."""
    found: list[tuple[float, int, Path]] = []
    for file in folder.rglob("*"):
        # another process may be making room as well
        with contextlib.suppress(OSError):
            if file.is_file() and not file.is_symlink():
                stat = file.stat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, file))
    total_bytes = 0
    for _, num_bytes, file in sorted(found, reverse=True):
        total_bytes += num_bytes
        if total_bytes > most_bytes:
            with contextlib.suppress(OSError):
                file.unlink()


def leave_broken_cache(error: Exception) -> bool:
    """Go on in an empty folder if the error is about a library that does not load or has gone; else return False."""
    if not any(name in f"{type(error).__name__}: {error}" for name in _BROKEN):
        return False
    folder = cache_folder("compiled")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_SETTING] = tempfile.mkdtemp(prefix="again-", dir=folder)
    return True
