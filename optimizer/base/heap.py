"""Memory that is freed on the processor stays with the process (``docs/decisions/0032``); where garbage is not looked for."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MALLOC_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables for the same settings; if one is set, nothing is changed here."""
KEPT_BYTES: Final = 2**31 - 1
"""The most that glibc accepts; free memory beyond it goes back to the system. Rough: the order of frees matters too."""
_MOST_ON_HEAP_BYTES = 2**30
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of these options in ``malloc.h``."""


def keep_freed_memory() -> None:
    """Make this process keep freed memory from now on. By default glibc returns a tensor of some 128 KiB to 32 MiB to the system
    as it is freed, and every page of the next one is then faulted in anew. Has no effect with another C library.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None or any(name in os.environ for name in MALLOC_SETTINGS):
        return
    set_option(_TRIM_THRESHOLD, KEPT_BYTES)
    set_option(_MMAP_THRESHOLD, _MOST_ON_HEAP_BYTES)


@contextmanager
def without_collections() -> Iterator[None]:
    """Look for no cycles of garbage inside, in any thread: for imports, traces and searches for plans, which leave hardly any.
    Among the objects of torch and transformers the look takes a fifth of the time of importing them, and as much of a search's.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def give_freed_memory_back() -> None:
    """Return memory that the process holds and does not use; called between phases of a run, whose tensors have other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
