"""Memory that is freed on the processor stays with the process (``docs/decisions/0032``)."""

import ctypes
import os
from typing import Final

MALLOC_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Where the environment sets one, it has its say."""
KEPT_BYTES: Final = 2**31 - 1
"""As much as glibc lets one ask for; what is free beyond goes back to the system. Rough: the order of frees matters too."""
_MOST_ON_HEAP_BYTES = 2**30
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""As ``malloc.h`` numbers them."""


def keep_freed_memory() -> None:
    """For this process, from now on. By itself glibc gives a tensor of some 128 KiB to 32 MiB back to the system as it is freed,
    and every page of the next one is then faulted in anew. Of no effect where the C library is another.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name in os.environ for name in MALLOC_SETTINGS):
        return
    set_option(_TRIM_THRESHOLD, KEPT_BYTES)
    set_option(_MMAP_THRESHOLD, _MOST_ON_HEAP_BYTES)


def give_freed_memory_back() -> None:
    """What the process holds and does not use; between the phases of a run, whose tensors have other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
