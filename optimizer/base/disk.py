"""The room on the disk that is kept free, so that a database can still write when checkpoints and uploads have taken the rest."""

import os

from optimizer.base.units import MIB

FLOOR_VARIABLE = "HEADROOM_DISK_FLOOR_BYTES"
_DEFAULT_FLOOR_BYTES = 256 * MIB


def disk_floor_bytes() -> int:
    """Bytes that checkpoints leave free, and below which no job is accepted. Raises ValueError that names the variable."""
    text = os.environ.get(FLOOR_VARIABLE, "")
    if text and not text.isdecimal():
        raise ValueError(f"{FLOOR_VARIABLE} is {text!r}; allowed: a number of bytes from 0")
    return int(text) if text else _DEFAULT_FLOOR_BYTES
