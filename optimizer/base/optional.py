"""Imports of optional packages, which are loaded only when something needs them."""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from optimizer.base.errors import MissingExtra

_BITSANDBYTES = "bitsandbytes"
_ADVISES = "bitsandbytes.backends.cpu.ops"


def load_bitsandbytes(*, needed_for: str) -> None:
    """Import bitsandbytes, which defines its ops. Raises MissingExtra if it is not installed."""
    if sys.modules.get(_BITSANDBYTES) is not None:
        return
    try:
        with without_advice():
            importlib.import_module(_BITSANDBYTES)
    except ImportError as error:
        raise MissingExtra(_BITSANDBYTES, needed_for=needed_for) from error


@contextmanager
def without_advice() -> Iterator[None]:
    """Silence the advice that bitsandbytes logs when it is imported, by itself or by peft: on processors with AVX-512 for bf16 it
    suggests a package that fetches a kernel from a hub. Nothing here uses that kernel, and nothing is to be fetched.
    """
    logger = logging.getLogger(_ADVISES)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
