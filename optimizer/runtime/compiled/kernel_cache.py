"""Names the folder where inductor keeps machine code of kernels between runs, and another one where a file there is broken.

Inductor writes a library where it is to be found, so a process that is killed meanwhile leaves half of one, which every later run
would find. Torch's own choice is a folder under /tmp, which a reboot empties and other users see.
"""

import os
import tempfile
from typing import Final

from optimizer.base.cache_folder import cache_folder

_SETTING: Final = "TORCHINDUCTOR_CACHE_DIR"
_BROKEN: Final = "ImportError"
"""Part of the message where a library does not load."""


def choose_cache() -> None:
    """Keep kernels in this program's cache, unless somebody else has set another folder. Torch sets its own once it was asked."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(_SETTING, "") in ("", default_cache_dir()):
        os.environ[_SETTING] = str(cache_folder("compiled"))


def leave_broken_cache(error: Exception) -> bool:
    """Go on in an empty folder if the error is about a library that does not load; else return False."""
    if _BROKEN not in f"{type(error).__name__}: {error}":
        return False
    folder = cache_folder("compiled")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[_SETTING] = tempfile.mkdtemp(prefix="again-", dir=folder)
    return True
