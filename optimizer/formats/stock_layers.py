"""The switch between the models' own norms and soft caps and ones that save memory (``docs/decisions/0035``). Torch-free."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SETTING: Final = "HEADROOM_LAYERS"
OWN: Final = "own"
"""The models' own code runs, as other programs run it."""


def uses_memory_saving_layers() -> bool:
    return os.environ.get(SETTING) != OWN


@contextmanager
def stock_layers() -> Iterator[None]:
    """Run the models' own layers inside, in this process and those it starts, to trace or measure what other programs hold."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = OWN
    try:
        yield
    finally:
        if before is None:
            del os.environ[SETTING]
        else:
            os.environ[SETTING] = before
