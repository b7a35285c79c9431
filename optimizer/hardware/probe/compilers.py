"""Finds whether this machine has the programs that torch's compiler needs to make code of compiled blocks. Torch-free."""

import shutil
import subprocess
import sysconfig
from importlib.util import find_spec
from typing import Final

_TIMEOUT_S: Final = 30.0


def missing_to_compile(device_kind: str) -> str:
    """The program without which no code is made for the device (``cpu`` or ``cuda``); empty where all is there.

    The compiler is tried on a line: one may be installed without its other half, or without Python's headers.
    """
    if device_kind == "cuda":
        has_compiler = any(_compiles(name, language="c") for name in ("cc", "gcc", "clang"))
        return "" if has_compiler and find_spec("triton") is not None else "no Triton with a C compiler and Python's headers"
    return "" if _compiles("g++", language="c++") else "no C++ compiler (g++) with Python's headers"


def compiler_in_words(device_kind: str) -> str:
    """The programs that make code for the device, where nothing is missing."""
    return "Triton with a C compiler" if device_kind == "cuda" else "g++"


def _compiles(name: str, *, language: str) -> bool:
    program = shutil.which(name)
    if program is None:
        return False
    headers = f"-I{sysconfig.get_path('include')}"
    try:
        ended = subprocess.run(
            [program, "-x", language, "-fsyntax-only", headers, "-"],
            input=b"#include <Python.h>\n",
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0
