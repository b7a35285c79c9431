"""Names the folder for files that save time in the next run: under ``HEADROOM_HOME``, or in the user's cache without one."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """``$HEADROOM_HOME/cache/NAME``, else ``headroom/NAME`` in the user's cache folder. It need not be there."""
    home = os.environ.get("HEADROOM_HOME")
    if home:
        return Path(home) / "cache" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headroom" / name
