"""Runs a check of an uploaded file in its own process: no credentials, bounded in time, memory and processor, killed when over.

A hostile file can then cost a few seconds and a refusal, never the web process.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB
from webapp.accounts.turns import present_person
from webapp.catalog.files.places import take_place

_PROGRAM_ROOT = Path(__file__).resolve().parents[3]
# -I drops the working directory from the path; it is appended, so nothing in it can stand in for the standard library
_BOOTSTRAP = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
MEMORY_BYTES = GIB
"""Address space of a check; reading a text or the largest tokenizer takes half of it."""
_MAX_OUTPUT_BYTES = 1024 * 1024
_OVER_LIMITS = "it could not be checked within the limits of memory and time"
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals by which a library ends its process."""


def run_limited(
    module: str,
    arguments: Sequence[str],
    *,
    field: str,
    error: type[InvalidInput],
    owner_id: int | None,
    timeout_s: float = 60,
    memory_bytes: int = MEMORY_BYTES,
) -> dict[str, Any]:
    """``python -m module arguments``; its one JSON object on stdout.

    owner_id: whose file it is. A person has one check at a time (``places.py``): who asks for it, or its owner where nobody does.
    ``{"error": HeadroomError.to_json()}``, a timeout or a crash is raised as ``error``. Raises ChecksBusy without a place for it.
    """
    asks = present_person()
    with take_place(owner_id if asks is None else asks) as locks:
        output, exit_code = _run(
            module, arguments, locks, field=field, error=error, timeout_s=timeout_s, memory_bytes=memory_bytes
        )
    return _read(output, exit_code=exit_code, field=field, error=error)


def _run(
    module: str,
    arguments: Sequence[str],
    locks: tuple[int, ...],
    *,
    field: str,
    error: type[InvalidInput],
    timeout_s: float,
    memory_bytes: int,
) -> tuple[bytes, int]:
    """Returns the bytes that the process printed, and its exit code."""
    command = [sys.executable, "-I", "-c", _BOOTSTRAP, str(_PROGRAM_ROOT), module, *arguments]
    # OpenBLAS reserves address space for each thread, which the memory limit would count
    environment = {"PATH": os.environ.get("PATH", ""), "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
        pass_fds=locks,
    )
    _limit(process.pid, timeout_s=timeout_s, memory_bytes=memory_bytes)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        process.kill()
        process.communicate()
        raise _refusal(error, field, f"checking it took longer than {timeout_s:.0f} s") from late
    return output, process.returncode


def _limit(pid: int, *, timeout_s: float, memory_bytes: int) -> None:
    """From outside, just after the start: a hook between fork and exec is unsafe in a process with threads."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: max(1, int(timeout_s)),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: GIB,
    }
    for kind, value in limits.items():
        try:
            resource.prlimit(pid, kind, (value, value))
        except (ProcessLookupError, PermissionError):
            return  # it has ended already, which is as limited as can be


def _read(output: bytes, *, exit_code: int, field: str, error: type[InvalidInput]) -> dict[str, Any]:
    try:
        document = json.loads(output[-_MAX_OUTPUT_BYTES:])
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        raise _as_sent(document["error"], field=field, error=error)
    if -exit_code in _CRASHES:
        raise _refusal(error, field, f"{_OVER_LIMITS}, or it is damaged and reading it crashed")
    if exit_code != 0 or not isinstance(document, dict):
        raise _refusal(error, field, _OVER_LIMITS)
    return document


def _as_sent(found: dict[str, Any], *, field: str, error: type[InvalidInput]) -> InvalidInput:
    """The check's own words; its ``field`` names the part of the file where there is one."""
    fields = found.get("fields") or {}
    return error(
        str(found.get("message")),
        field=str(fields.get("field") or field),
        value=fields.get("value"),
        allowed=fields.get("allowed"),
        hint=str(found.get("hint") or ""),
    )


def _refusal(error: type[InvalidInput], field: str, why: str) -> InvalidInput:
    return error(f"{field} is refused: {why}", field=field, allowed="a file that can be checked within the limits")
