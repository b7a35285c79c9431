"""Names the folder that an attempt leaves its artifacts in, with the fence in it. Torch-free.

Artifacts count once their rows are written, which happens under the fence. So an attempt that lost its job and has not noticed
may write at the same time as the next one: neither touches what the other writes, and nobody looks at what no row names.
"""

import re
from pathlib import Path
from typing import Final

ARTIFACTS_FOLDER: Final = "artifacts"
_NAME: Final = re.compile(r"f(?P<fence>\d+)")


def artifacts_place(fence: int) -> str:
    """The folder relative to the job's, with a slash between."""
    return f"{ARTIFACTS_FOLDER}/f{fence}"


def fence_of_artifacts(folder: Path) -> int | None:
    """Fence of the attempt whose folder it is; None for what no attempt has made."""
    match = _NAME.fullmatch(folder.name)
    return int(match["fence"]) if match else None
